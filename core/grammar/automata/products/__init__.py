"""Products of automata: intersections and differences of regular languages."""
