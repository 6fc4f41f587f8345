"""The language: gen, select, fork and join, and the thread that moves programs."""
