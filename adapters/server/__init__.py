"""`graftlm serve`: an OpenAI-compatible HTTP server over one runtime.

It serves clients in other processes and languages, any number at a time. A runtime under a framework in the same
process does not import it.
"""

from graftlm.adapters.server.app import Server
from graftlm.adapters.server.settings import ServerSettings

__all__ = ["Server", "ServerSettings"]
