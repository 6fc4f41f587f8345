"""The JSON text of a shape: its tokens, numbers, strings, objects and arrays."""
