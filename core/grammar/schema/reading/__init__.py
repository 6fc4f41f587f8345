"""Read the keywords of a schema into shapes."""
