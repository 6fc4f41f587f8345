"""Between callers and the engine: one thread owns it, and results go back to futures, streams and event loops."""
