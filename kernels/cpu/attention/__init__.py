"""Attention on CPUs over the KV store: the backend, what its steps read, and the compiled decode and prefill paths."""
