"""Answers on the wire: JSON objects, server-sent events and errors, as the OpenAI API has them."""
