"""Attention on GPUs over the KV store: decode, extend, shared prefixes and prefill, and the buffers of a step."""
