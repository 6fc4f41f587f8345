"""KV slots: pages, the radix tree of cached prefixes, and how K and V are kept."""
