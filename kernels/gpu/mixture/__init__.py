"""Mixtures of experts on GPUs: routers, blocks of tokens by expert, grouped matmuls.

Every layer with experts runs through them in every step. The cost beside the matmuls is two small kernels for the
router and the sort of the tokens by expert, without synchronising with the host.
"""
