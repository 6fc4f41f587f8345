"""EndpointSource: the model source of a runtime whose model is behind an API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import ConfigError, GraftError
from graftlm.core.model.source import Prepared
from graftlm.core.remote.config import EndpointConfig

if TYPE_CHECKING:
    from graftlm.core.engine_protocol import Engine
    from graftlm.core.request import Request
    from graftlm.core.text.processor import Processor
    from graftlm.core.text.tokenizer import Tokenizer


class EndpointSource:
    """A model by its name at an endpoint. Its tokenizer is available only if the user gave one."""

    def __init__(self, config: EndpointConfig, tokenizer: Any) -> None:
        from graftlm.core.remote.endpoint import Endpoint  # half of the import of this package, unused by local models

        self.given_tokenizer = tokenizer
        self.endpoint = Endpoint(config, tokenizer)

    @property
    def name(self) -> str:
        return self.endpoint.config.model

    @property
    def tokenizer(self) -> Tokenizer:
        self.endpoint.open()
        if self.endpoint.tokenizer is None:
            raise ConfigError(
                f"the tokenizer of {self.name!r} at {self.endpoint.config.base_url} is not known; "
                "give tokenizer= for what needs tokens"
            )
        return self.endpoint.tokenizer

    @property
    def processor(self) -> Processor:
        """The renderer of prompts into the tokens of the given tokenizer."""
        from graftlm.core.text.processor import TextProcessor

        return TextProcessor(self.tokenizer)

    @property
    def max_model_len(self) -> int:
        raise ConfigError(f"the context of {self.name!r} is known to {self.endpoint.config.base_url} alone")

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for the same model name at the same URL; the weights there may change."""
        return sha256(f"{self.endpoint.config.base_url} {self.name}".encode()).hexdigest()

    def answers_on(self) -> bool:
        """Return True if the caller is on the loop of endpoints, where callbacks and listeners are called."""
        from graftlm.core.remote.transport import loop

        return loop.is_here()

    def waves(self, requests: Sequence[Request]) -> Iterable[slice]:
        """Return all requests as one wave: endpoints take them as they come."""
        return [slice(0, len(requests))]

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | GraftError]:
        """Return the requests with their prompts and constraints unchanged."""
        return [Prepared() for _ in requests]

    def build_engine(self, wake: Callable[[], None]) -> Engine:
        from graftlm.core.remote.engine import RemoteEngine
        from graftlm.plugins import manager

        self.endpoint.open()
        return RemoteEngine(self.endpoint, finished=manager.load().request_finished)
