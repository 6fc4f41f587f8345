"""Triton kernels compiled ahead of their first launch, side by side, in processes of their own."""
