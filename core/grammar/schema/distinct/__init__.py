"""Items that must differ: what tells them apart, and where that may leave no way to end a text."""
