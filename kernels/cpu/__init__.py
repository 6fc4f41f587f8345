"""Attention, matmuls and elementwise work on CPUs, as torch calls and as compiled loops (numba).

Every step of a model on a CPU runs through these. The modules of the loops import no torch, so that a process can
compile loops without it.
"""

PANEL = 64
"""Output columns of a panel, in oneDNN's weight layout and in our loops: four vector registers of 16 float32."""

MAX_RUN = 16
"""The largest number of single queries of a row that read their keys together."""

INT8_LARGEST = 127.0
INT8_LEAST_SCALE = 1e-30
"""Largest absolute value of keys and values in int8, and the least scale, by which a vector of zeros is divided."""
