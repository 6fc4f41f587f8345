"""Cache tiers behind the radix tree: what it evicts goes to host memory, and prompts that are reused to a folder.

Off by default. With a tier, each eviction and each admission of a prompt with more in a tier than in the tree passes
here; a lookup costs about a microsecond for each 64 tokens of a prompt, once, and a prompt that is in no tier nothing
else. The tree stays a map of the device's slots: a tier is read by storing its blocks in slots and publishing these.
"""
