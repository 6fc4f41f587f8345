"""Sampling from logits on GPUs: token masks, argmax, top-p and min-p without sorting."""
