"""Drafts of grammars: constraints compiled as far as no vocabulary is needed, in processes of their own."""
