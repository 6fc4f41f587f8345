"""Attention, matmuls and elementwise work on GPUs in Triton, and the libraries used beside it.

Every step of a model on an NVIDIA GPU runs through these kernels; on a Hopper GPU those of hopper/ replace some. Each
kernel compiles once a machine.
"""
