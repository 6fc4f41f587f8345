"""Object code of the CPU loops: made ahead of time, kept on disk, linked, and run on PyTorch's own threads.

Every process that runs a model on a CPU links the 8 to 9 loops of its model here. Their compilation takes some 5
seconds of CPU time; it runs once a machine, in separate processes, for loops that package and cache folder lack.
"""
