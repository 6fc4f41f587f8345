"""Object code of the CPU loops: made ahead of time, kept on disk, linked, and run on PyTorch's own threads.

Every process that runs a model on a CPU links the 8 to 9 loops of its model here. To compile them takes some 5 seconds
of CPU time, so loops that neither the package nor the cache folder has are compiled once a machine, by other processes.
"""
