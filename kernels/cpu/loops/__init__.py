"""The compiled loops as numba compiles them. A process whose loops are all on disk imports none of this, nor numba."""
