"""Which sequences run in a step, and what becomes of the requests they belong to."""
