"""The vocabulary's side of masks: its trie, the trie kept on disk, and slices of tokens of one class of characters."""
