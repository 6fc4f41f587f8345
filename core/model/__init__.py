"""Loading a model: its description, weights and lane, and the kernels it needs.

load.py has the order. A model is loaded once a process, which takes as long as reading its weights, a forward of the
original and the compilation of kernels that no cache has. description.py and source.py answer before that from the
configuration and tokenizer alone. known_models.py keeps on disk the results of a load, for later processes.
"""
