"""Several runtimes behind one engine: replicas in processes of their own, on Ray, and the router before them.

The router runs once a request and hashes the prompt in blocks of 64 tokens; chunks of answers cross processes in lists.
Measured over Ray on one CPU machine: one token takes 2.6 ms longer than in process (docs/ray.md).
"""
