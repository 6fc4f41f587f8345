"""What sampling does with logits on GPUs: token masks and argmax."""
