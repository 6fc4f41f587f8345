"""The routes of `graftlm serve`: what each takes, and what it answers."""
