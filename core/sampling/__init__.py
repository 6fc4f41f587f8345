"""From logits to tokens, on the host and on the device."""
