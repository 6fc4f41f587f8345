"""`graftlm serve`: an OpenAI-compatible HTTP server over one runtime."""

from graftlm.adapters.server.app import Server
from graftlm.adapters.server.settings import ServerSettings

__all__ = ["Server", "ServerSettings"]
