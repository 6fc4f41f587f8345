"""From the keywords of a schema to shapes."""
