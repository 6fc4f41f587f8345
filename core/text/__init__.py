"""Tokenisation and detokenisation, with prompts rendered and cut within limits of time and length.

Every request is encoded once and every output token decoded once. Prompts that share a prefix reuse its tokens up to a
safe cut, and the prompts of one call are encoded together.
"""
