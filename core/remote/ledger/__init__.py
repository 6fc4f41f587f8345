"""The cost of calls, in tokens and money.

Runs once for each response, with no request of its own. The package genai-prices, if it is installed and needed, reads
a table of some megabytes on first use, on another thread.
"""
