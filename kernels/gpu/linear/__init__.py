"""Matrix products of few rows on GPUs."""
