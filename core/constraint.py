"""Compile a request's constraint into the grammar that its sequence will follow."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import reprlib
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.interpreter_exit import EXIT_WAIT_S, end_thread

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.grammar.spec import Whitespace
    from graftlm.core.grammar.vocabulary import Vocabulary
    from graftlm.core.request import Request
    from graftlm.core.text.tokenizer import Tokenizer

_DELAY_S = 0.2
"""Seconds between a load and what it prepares, which would share Python's lock with the first tokens; a process that
ends before prepares nothing."""
_FORK_WAIT_S = 10.0
"""How long a fork waits for what a thread prepares; after that it goes on as it is."""
_lock = threading.Lock()
_preparing = threading.RLock()
"""Held while modules are imported and a vocabulary is indexed: a fork in between would never see the rest of them."""
_forking = threading.local()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads that prepare constraints."""
_leaving = threading.Event()
"""Set at exit: such threads begin no more."""


def _before_fork() -> None:
    _forking.waited = _preparing.acquire(timeout=_FORK_WAIT_S)


def _after_fork() -> None:
    if _forking.waited:
        _preparing.release()


def _new_locks() -> None:
    global _lock, _preparing, _leaving
    _leaving = threading.Event()
    _lock, _preparing = threading.Lock(), threading.RLock()  # a thread that held one is not in the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_new_locks)


def vocabulary_of(tokenizer: Tokenizer, markers: tuple[str, ...] = ()) -> Vocabulary:
    """The grammar vocabulary of a tokenizer, built once.

    markers  names of special tokens that the grammar requires
    """
    from graftlm.core.grammar.vocabulary import Vocabulary

    key = (Vocabulary, markers) if markers else Vocabulary
    with _lock:
        vocabulary: Vocabulary | None = tokenizer.derived.get(key)
        if vocabulary is None:
            vocabulary = tokenizer.derived[key] = Vocabulary.from_tokenizer(tokenizer, markers=markers)
        return vocabulary


def prepare_constraints(tokenizer: Tokenizer) -> None:
    """Prepare what the first constraint needs, in a thread, soon after a model is loaded. Returns at once.

    These are the grammar modules, the trie over the vocabulary, and the loops whose object code is ready; loops that
    have none are compiled after the first constraint. Only the time of the first constrained request depends on it.
    """
    thread = threading.Thread(target=_prepare, args=(tokenizer,), name="graftlm grammar", daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _end_preparation() -> None:
    """End the threads that prepare constraints at exit: the process would abort with one inside compiled code."""
    _leaving.set()
    for thread in list(_threads):
        end_thread(thread, EXIT_WAIT_S)


def _prepare(tokenizer: Tokenizer) -> None:
    if _leaving.wait(_DELAY_S):
        return
    with suppress(Exception), _preparing:  # the request that needs it meets the error
        for name in ("compile", "cache", "regex.parser", "schema.lowering"):
            importlib.import_module(f"graftlm.core.grammar.{name}")
        vocabulary_of(tokenizer).prepare()
        importlib.import_module("graftlm.core.grammar.automata.jit").prepare(compiles=False)


def prepare_llguidance(tokenizer: Tokenizer) -> None:
    """Prepare what the first constraint that no automaton holds needs: llguidance's tokenizer, once per process.

    It takes 0.7 s for 128,000 tokens of a real vocabulary and 100 MB. llguidance keeps Python's lock meanwhile: call
    this where nobody waits for an answer, as `graftlm serve` does while it loads.
    """
    with suppress(Exception):  # the request that needs it meets the error
        from graftlm.core.grammar.engines.byte_tokenizer import tokenizer_of

        tokenizer_of(vocabulary_of(tokenizer))


def spec_of(sampling: SamplingParams) -> Any:
    """The one constraint of `sampling` as Grammar.compile takes it."""
    from graftlm.core.grammar.spec import Choices, JsonSchema, Lark, Regex

    if sampling.regex is not None:
        return Regex(sampling.regex)
    if sampling.choices is not None:
        return Choices(list(sampling.choices))
    if sampling.json_schema is not None:
        schema = sampling.json_schema
        return schema if isinstance(schema, JsonSchema) else JsonSchema(schema)
    if sampling.grammar is not None:
        return Lark(sampling.grammar)
    return sampling.constraint


_SHOWN_JSON = re.compile(r'\{(\s*\n\s*)?"[^"\n]{1,200}"\s*:( ?)')
_LAST_TOKENS = 512
"""Tokens at the end of a prompt of ids that are decoded to look for JSON."""


def shown_whitespace(prompt: Any, tokenizer: Tokenizer) -> Whitespace:
    """Return the whitespace of the last JSON object that a prompt shows; "compact" if it shows none.

    On SmolLM2-135M the tokens that a grammar forces cost least in this form (docs/grammar.md has the figures).
    """
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Sequence) and len(prompt) and not isinstance(prompt[0], int | np.integer):
        contents = [m.get("content") if isinstance(m, Mapping) else getattr(m, "content", None) for m in prompt]
        text = "\n".join(content for content in contents if isinstance(content, str))
    else:
        ids = np.asarray(getattr(prompt, "ids", prompt))[-_LAST_TOKENS:]
        text = tokenizer.decode(ids[ids >= 0].tolist())
    shown = [(found[1], found[2]) for found in _SHOWN_JSON.finditer(text)]
    indent, space = shown[-1] if shown else ("", "")
    return "flexible" if indent else "single" if space else "compact"


def compile_constraint(
    sampling: SamplingParams, tokenizer: Tokenizer, engine: str | None = None, *, prompt: Any = ""
) -> Future[Grammar]:
    """Compile in a worker, once for equal constraints; errors come out of the future.

    engine  the grammar engine's name; None takes the fastest that keeps the constraint.
    prompt  of the request, for `whitespace="auto"`

    A constraint that brings its own matchers (an object with `matcher()`) is taken as it is. ConfigError for an object
    that is no constraint.
    """
    spec = spec_of(sampling)
    if callable(getattr(spec, "matcher", None)):
        ready: Future[Any] = Future()
        ready.set_result(spec)
        return ready
    from graftlm.core.grammar.cache import submit_compile
    from graftlm.core.grammar.spec import Choices, Composite, JsonSchema, Lark, Regex

    if not isinstance(spec, Choices | Composite | JsonSchema | Lark | Regex):
        raise ConfigError(
            f"constraint is {reprlib.repr(spec)}; give gl.Regex, gl.Choices, gl.JsonSchema, gl.Lark, a compiled "
            "Grammar or an object whose matcher() makes the matcher of one sequence"
        )
    vocabulary = vocabulary_of(tokenizer, spec.markers if isinstance(spec, Composite) else ())
    options: dict[str, Any] = {"engine": engine, "on_unsupported": sampling.on_unsupported}
    if isinstance(spec, JsonSchema):
        written = sampling.whitespace
        options |= {
            "bounded_numbers": sampling.bounded_numbers,
            "whitespace": shown_whitespace(prompt, tokenizer) if written == "auto" else written,
            "strict": sampling.strict_schema,
        }
    future = submit_compile(spec, vocabulary, **options)
    if sampling.on_unsupported == "warn":
        future.add_done_callback(_warn)
    return future


def constraint_behind_thinking(request: Request, tokenizer: Tokenizer, engine: str | None) -> Future[Any] | None:
    """Compile the constraint of a request whose model thinks: it begins behind the thinking. None without either.

    A model that does not think in this request, or whose markers are no single tokens, has its plain constraint.
    """
    from graftlm.core.chat.thinking_matcher import behind_thinking

    assert request.thinking is not None
    sampling = request.sampling
    grammar = compile_constraint(sampling, tokenizer, engine, prompt=request.prompt) if sampling.constrained else None
    has_header = getattr(sampling.constraint, "has_header", False)
    rule = request.thinking.rule(tokenizer, request.thinking_budget, has_header=has_header)
    return grammar if rule is None else behind_thinking(rule, grammar)


def _warn(compiled: Future[Grammar]) -> None:
    """Warn of what a grammar leaves out; Python shows each text once."""
    if compiled.exception() is None:
        for issue in compiled.result().warnings:
            warnings.warn(f"the constraint is not kept exactly: {issue}", stacklevel=2)
