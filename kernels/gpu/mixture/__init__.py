"""Mixtures of experts on GPUs: routers, blocks of tokens by expert, grouped products."""
