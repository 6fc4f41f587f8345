"""What a constructor of an OpenAI client is given: the key, and the URL of a server that is started for it or runs."""

from __future__ import annotations

import importlib
import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from graftlm.ab.classes.server import KINDS, RUNNING_S, Server, is_url
from graftlm.core.errors import EngineError

Constructor = Callable[..., Any]


def load(module: str) -> Any:
    """Import a module by name; what is missing is told with its `pip` command.

    Where none of a namespace's packages is there, Python names the namespace; the error names the module.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(f"{error.name}."):
            error.name = module
        raise


def key() -> str:
    return os.environ.get("GRAFTLM_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"


def running(where: str, model: str) -> tuple[str, str]:
    """The URL of a server, and the name of its model: what follows in `URL#name`, else `model`."""
    url, _, name = where.partition("#")
    return url, name or model


def served(client: Constructor, names: tuple[str, ...] = tuple(KINDS)) -> Mapping[str, Constructor]:
    """The engines behind a server of their own, for the framework whose OpenAI client is `client(model, url)`.

    Each takes the model, and another name of it for that engine alone, such as a GGUF file; or the URL of a server that
    runs already, see `running`.
    """

    def constructor(name: str) -> Constructor:
        def start(model: str, own: str = "") -> Any:
            if not is_url(own):
                return client(own or model, Server(name, own or model).url)
            url, asked = running(own, model)
            server = Server(name, url)
            if server.lists:
                _must_know(server, url, asked)
            return client(asked, server.url)

        return start

    return {name: constructor(name) for name in names}


def _must_know(server: Server, url: str, model: str) -> None:
    """EngineError where a server lists its models and `model` is none of them; a pipeline may keep its 404s."""
    asked = urllib.request.Request(f"{server.url}/models", headers={"Authorization": f"Bearer {key()}"})
    with urllib.request.urlopen(asked, timeout=RUNNING_S) as answer:
        known = [str(one["id"]) for one in json.load(answer)["data"]]
    if model not in known:
        server.close()
        raise EngineError(
            f"{server.name} at {url} has no model {model!r}, but {', '.join(map(repr, known)) or 'none'}; name one of "
            f"them: {server.name}:{url}#{known[0] if known else 'NAME'}"
        )
