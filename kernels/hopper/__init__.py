"""Kernels for Hopper GPUs, written in Gluon: they use its copy engine and asynchronous matrix units."""
