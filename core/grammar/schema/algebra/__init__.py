"""Sets of JSON values, and what can be asked of them."""
