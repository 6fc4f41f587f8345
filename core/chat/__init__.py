"""Messages, chat templates and tool calls."""
