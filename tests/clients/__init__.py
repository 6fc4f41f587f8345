"""Clients that others wrote, in pinned versions: `make test-clients` installs them and runs a job with each.

It needs a package index and takes some minutes, therefore `make test` leaves it out.
"""
