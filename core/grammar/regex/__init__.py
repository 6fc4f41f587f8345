"""Regular expressions, read into AST nodes."""
