"""A model behind an OpenAI-compatible API: requests, capabilities, speculation and what they cost."""
