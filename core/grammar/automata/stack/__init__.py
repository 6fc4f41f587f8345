"""Languages with rules that call themselves: automata with a stack, deterministic and not."""
