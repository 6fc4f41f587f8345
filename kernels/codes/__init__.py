"""Quantised weights on GPUs: codes of 4 or 8 bits in the matrix units' own layout, multiplied without a dense copy.

Every decode step of a quantised model runs these kernels (Hopper only): matmul.py up to 64 rows, in the time of reading
the codes, an eighth to a half of bfloat16's bytes; wide_matmul.py beyond, which decodes codes once for 256 rows;
experts.py. Long prefills widen one weight at a time (widen.py, Triton).
"""
