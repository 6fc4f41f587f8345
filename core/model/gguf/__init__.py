"""Models in GGUF files, those of Ollama too: metadata, tokenizer and weights of llama.cpp's formats.

A file is described once, as a folder in the cache that transformers and this runtime read like any other
(`folder.py`); its weights stay in the file. Reading a header costs 0.1 s, a first description up to a few seconds,
weights what their bytes and arithmetic cost.
"""
