"""Sources of the compiled loops, for numba. A process whose loops are all on disk imports neither these nor numba."""
