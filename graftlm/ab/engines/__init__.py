"""Engines by name: a framework's own class over transformers, over GraftLM, or over an OpenAI-compatible server.

One engine is built for each engine process of a comparison. A server takes seconds to minutes to start; a running one
is used as it is.
"""
