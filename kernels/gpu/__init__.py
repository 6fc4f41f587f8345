"""Attention, matrix products and elementwise work on GPUs in Triton, and the libraries used beside it."""
