"""Quantised checkpoints of Hugging Face: checked before any weight is read, and read without their formats' packages.

Runs once a load; the cost is the headers of the weight files, then the bytes and arithmetic of the weights.
"""
