"""Triton kernels for matrix products on any NVIDIA GPU: one row, few rows, and rows that do not depend on their batch.

Every decode step reads all weights through the first two, or through a Hopper kernel in their place; strict mode uses
the third for all steps where no Hopper kernel has one order of sums. linear_kernels.py chooses by the number of rows.
"""
