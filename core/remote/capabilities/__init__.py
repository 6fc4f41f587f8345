"""Capabilities of an endpoint: declared, documented by its host, or detected by probes.

A probe runs when a capability is first needed, once per endpoint. It costs one request of a few tokens, which the
ledger counts.
"""
