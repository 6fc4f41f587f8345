"""The cost of calls, in tokens and money."""
