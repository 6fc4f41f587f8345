"""ModuleRequests: a prompt with modules waits for requests that compute those of its modules that no cache has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Chunk, Completion, EndListener, Request, Submission

if TYPE_CHECKING:
    import numpy as np

    from graftlm.core.kv.prefix_cache import PrefixCache
    from graftlm.core.scheduling.request_tracker import RequestTracker


class ModuleRequests:
    """Adds requests whose prompts have modules; the engine's thread calls it.

    A module is computed once for all requests that wait for it, as a prompt of its own.
    """

    def __init__(self, requests: RequestTracker, cache: PrefixCache) -> None:
        self._requests = requests
        self._cache = cache

    def add(self, submission: Submission) -> None:
        """Queue a request behind those that compute what it lacks."""
        prompt, request = submission.prompt, submission.request
        assert prompt is not None
        modules, namespace = self._cache.modules, request.namespace
        refused = self._requests.limits.no_modules is not None
        missing = [] if refused else modules.take(submission.id, prompt, namespace)
        ended = partial(modules.give, submission.id, prompt, namespace)
        self._requests.add(replace(submission, listener=EndListener(submission.listener, ended)))
        for ids in missing:
            if not modules.users(ids, namespace):
                continue  # the request was refused
            alone = Request(ids, namespace=namespace, owner=request.owner, priority=request.priority)
            alone.want_logits = alone.pin = True
            listener = _Computed(partial(self._computed, ids, namespace), partial(self._failed, ids, namespace))
            self._requests.add(Submission(alone, listener, PromptInput(ids), arrived_s=submission.arrived_s))

    def _computed(self, ids: np.ndarray, namespace: str, completion: Completion) -> None:
        self._cache.modules.computed(ids, namespace)
        if completion.pin is not None:
            self._cache.unpin(completion.pin)

    def _failed(self, ids: np.ndarray, namespace: str, error: BaseException) -> None:
        for user in self._cache.modules.users(ids, namespace):
            self._requests.cancel(user, error)


class _Computed:
    """The listener of a request that computes a module."""

    def __init__(self, finished: Callable[[Completion], None], failed: Callable[[BaseException], None]) -> None:
        self.on_finish = finished
        self.on_error = failed

    def on_chunk(self, chunk: Chunk) -> None:
        pass
