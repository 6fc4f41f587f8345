"""What a constructor of an OpenAI client is given: the key, and the URL of a server that is started for it or runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from graftlm.ab.classes.server import KINDS, Server, is_url

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


def served(client: Constructor, names: tuple[str, ...] = tuple(KINDS)) -> Mapping[str, Constructor]:
    """The engines behind a server of their own, for the framework whose OpenAI client is `client(model, url)`.

    Each takes the model, and another name of it for that engine alone, such as a GGUF file; or the URL of a server that
    runs already and knows the model by the first name.
    """

    def constructor(name: str) -> Constructor:
        def start(model: str, own: str = "") -> Any:
            return client(model if is_url(own) else own or model, Server(name, own or model).url)

        return start

    return {name: constructor(name) for name in names}
