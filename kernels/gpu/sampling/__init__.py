"""Sampling from logits on GPUs: token masks, argmax, top-p and min-p without sorting.

Steps on a GPU apply masks and sample here. Greedy sampling reads the logits once, top-p in a few passes.
"""
