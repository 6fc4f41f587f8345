"""Embeddings, scores and ranks from a second model beside the generating one.

It serves retrieval, which sends many short texts: a request is one forward pass for each 32 texts, on a thread of its
own. A server without `--embedding-model` loads nothing of it.
"""
