"""One forward of a step: paged with ragged batches, captured in CUDA graphs, or one sequence at a time."""
