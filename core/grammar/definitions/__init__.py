"""Grammars that are written as text, in Lark or in EBNF: their tokens, their rules, what is wrong with them."""
