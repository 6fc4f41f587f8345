"""Faster equals of a model's modules, put in place when it is loaded and taken out again when it is closed."""
