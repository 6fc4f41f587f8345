"""Weights and KV in 12 bits a number: the codecs, and the kernels that read them."""
