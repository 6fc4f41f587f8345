"""Between text and token ids."""
