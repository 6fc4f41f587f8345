"""Grammar engines: the compressed FSM, llguidance; and the texts that they are given."""
