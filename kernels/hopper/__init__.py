"""Kernels for Hopper GPUs, written in Gluon, with the card's copy engine and asynchronous matrix units.

Every step of a 16-bit model on such a card runs through them: matmuls of up to 64 rows, gates of 33 to 256 and of more
than 512, attention of long prompts. The cost is compilation when a model is first loaded; other cards import none of
these modules (support.py).
"""
