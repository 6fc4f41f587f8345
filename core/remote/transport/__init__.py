"""Requests over the network: bodies, answers, connections, deadlines, retries and failures.

Runs once for each request, on one event loop for all endpoints of the process. With 64 requests in flight a call takes
1.12 ms of CPU time, the bare SDK's 1.23 ms (docs/remote.md, case `overhead`).
"""
