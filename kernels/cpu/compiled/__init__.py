"""Object code of the CPU loops: made ahead of time, kept on disk, linked, and run on PyTorch's own threads."""
