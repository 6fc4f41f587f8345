"""Messages, chat templates and tool calls, for every adapter, the server and programs.

A template's format is learned once per tokenizer, by rendering placeholders. The grammar of an answer with tools is
cached by its arguments. Each message is rendered once a request, and each chunk of an answer is scanned once.
"""
