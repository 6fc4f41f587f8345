"""Replacements of a model's modules by faster equivalents, each compared with its original on random input.

Modules are replaced once, when a model is loaded, and restored when it is closed; every step runs through the
replacements. The cost is a forward of each module and its replacement, and one layer's weights in memory twice.
gpu_modules.py and gpu_layers.py serve GPUs; linears.py, cpu_layers.py and decoder_stack.py serve CPUs; layer_parts.py
recognises layers for both.
"""
