"""Loading a model from a name, a folder or loaded objects; checking it and compiling its kernels."""
