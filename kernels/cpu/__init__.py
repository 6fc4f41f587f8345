"""Attention, matrix products and elementwise work on CPUs, as torch calls and as compiled loops (numba)."""
