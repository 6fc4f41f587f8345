"""Attention, matrix products and elementwise work on CPUs, as torch calls and as compiled loops (numba).

The modules of the loops import no torch, so that a process can compile them without it.
"""

PANEL = 64
"""Output columns of a panel, in oneDNN's weight layout and in our loops: four vector registers of 16 float32."""

MAX_RUN = 16
"""The largest number of single queries of a row that read their keys together."""

INT8_LARGEST = 127.0
INT8_LEAST_SCALE = 1e-30
"""Keys and values in int8 are whole numbers up to INT8_LARGEST. No scale is less than INT8_LEAST_SCALE: a vector
of zeros is divided by its own."""
