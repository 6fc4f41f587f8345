"""One forward pass of a step: a ragged batch over paged KV, a CUDA graph, or one sequence at a time."""
