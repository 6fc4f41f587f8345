"""Whole decoder layers on CPUs: half a layer, a layer, all layers, or several greedy decode steps in one compiled call.

Every step of few tokens of a model with layers of the common shape runs here, at the cost of one call instead of one a
module, which is much of a small model's step. Each layer is compared with the model's own when it is loaded.
"""
