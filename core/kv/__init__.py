"""KV slots: pages, the radix tree of cached prefixes, and how K and V are kept.

Serves every step: a sequence that starts is matched once (microseconds a node), slots are reserved every 64 tokens, and
a prompt is published once. Law: free + cached + in use == all slots of the pool.
"""
