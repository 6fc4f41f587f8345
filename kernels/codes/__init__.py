"""Quantised weights on GPUs: codes of 4 or 8 bits in the matrix units' own layout, multiplied without a dense copy.

Every decode step of a quantised model runs these kernels (matmul.py, experts.py; Hopper only), and its time is that of
reading the codes: an eighth to a half of bfloat16's bytes. Prefill widens one weight at a time (widen.py, Triton),
0.2 ms a layer of an 8B model.
"""
