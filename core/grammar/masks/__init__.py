"""Token masks and forced tokens: a vocabulary's trie walked along an automaton's states."""
