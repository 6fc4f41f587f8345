"""A constraint as a Lark grammar, which llguidance matches."""
