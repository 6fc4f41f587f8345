"""Replacements of a model's modules by faster equals, each compared with its original on random input.

They are made once, when a model is loaded, and undone when it is closed; every step runs through them. The price is a
forward of each module and its replacement, and one layer's weights in memory twice. gpu_modules.py and gpu_layers.py
are for GPUs, linears.py, cpu_layers.py and decoder_stack.py for CPUs; layer_parts.py recognises layers for both.
"""
