"""The language: programs of gen, select, fork and join, and the thread that interprets them."""
