"""Tensor parallel: one model over several ranks of one host, each with a part of every layer's weights and KV.

Rank 0 is the process of the runtime: it schedules, samples and owns the prefix cache. Followers are processes that it
starts when the model is loaded; they get each step as a WirePlan through shared memory and run the forward pass of
their shard. A step costs one write to memory and two sums over the ranks in each layer.
"""
