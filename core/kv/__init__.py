"""KV slots: pages, the radix tree of cached prefixes, and how K and V are kept.

Serves every step: a sequence that starts is matched once (microseconds a node), slots are reserved every 64 tokens, and
a prompt is published once. Law: free + cached + in use == all slots of the pool.

Place of a tier, such as host memory behind a GPU's pool. All KV is on the device today: a node's `extent` is its
location. A tier has two methods and its own count of the law:

    put(node, copy) -> handle  called by `PrefixCache._evict`, the only place that evicts, with `KVStore.read` of the
                               slots before they are freed; the node stays in the tree, its location is the handle
    get(handle) -> copy        called by `PrefixCache.start`, where a match ends in such a node; `KVStore.write` puts
                               the copy into reserved slots. Until it has arrived the sequence may not run

A copy names its layout by the shapes and dtypes of its tensors, and `write` refuses any other.
"""
