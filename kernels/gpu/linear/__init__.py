"""Triton matmuls for any NVIDIA GPU: one row, few rows, and batch-invariant rows.

Every decode step reads all weights through the kernels of one or few rows, or through a Hopper kernel in their place;
strict mode uses the batch-invariant one for all steps where no Hopper kernel has one order of sums. linear_kernels.py
chooses by the number of rows.
"""
