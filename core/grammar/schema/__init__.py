"""JSON schemas, read into shapes and lowered to AST nodes."""
