"""Requests over the network: bodies, answers, retries, failures."""
