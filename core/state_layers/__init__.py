"""The layers with a state of hybrid models: their kinds, and the model families that have them.

A model's modules with a state are found by class name when it is loaded, and run by our own forward in every step of
the paged lane. A file per kind; a family is a row of the table in state_layers.py. A load visits each module once.
"""
