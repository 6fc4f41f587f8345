"""Grammar engines: the compressed FSM, llguidance, xgrammar; and the texts that they are given."""
