"""Mask rows: how they are kept, when they are computed, and the threads that compute them."""
