"""Linear layers on CPUs: weights packed once, for oneDNN's matmuls and for compiled matmuls of few rows.

Every linear layer of a model on a CPU is packed when it is loaded, which copies its weight once and frees the original.
Matmuls of 1 to 64 rows then run 1.3 to 2.6 times as fast as torch's.
"""
