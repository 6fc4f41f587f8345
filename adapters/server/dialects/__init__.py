"""Other HTTP dialects as translations onto a chat request: OpenAI's responses, Anthropic's messages, Ollama's API.

They serve agents and tools whose client speaks no chat completions. A request costs one translation of its body; a
stream's chunk costs one JSON object more than a chat chunk. Nothing below a chat request knows of a dialect.
"""
