"""Masks and forced tokens over 128,000 tokens: their cost, and their equality with xgrammar's and llguidance's.

Texts that a model would write are replayed token by token. Times are CPU times of one thread. A place is cold when its
grammar has no mask for it yet. Where most of the vocabulary is allowed, it is a string body if it repeats a class of
characters; where it does not (a pattern and a length at once, say), no tokens can be known beforehand.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bench.grammar import _constraints, _vocabularies
from bench.grammar._answers import ANSWERS, compact
from bench.grammar.validity import write
from bench.harness import Options, Row
from graftlm import Grammar, JsonSchema, Regex, Vocabulary
from graftlm.core.grammar.automata.dfa import Place
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.masks.self_loops import self_loop

XGRAMMAR_PATTERNS = (
    "letters and digits",
    "e-mail",
    "day",
    "phone",
    "octets",
)  # it knows no flags and no \w beyond ASCII
RANDOM_TOKENS = 40


def cpu_us(function: Callable[[], Any]) -> float:
    """CPU time of one call on this thread, without that of reading the clock."""
    start = time.thread_time_ns()
    idle = time.thread_time_ns()
    function()
    end = time.thread_time_ns()
    return max(0, (end - idle) - (idle - start)) / 1000


def texts(vocabulary: Vocabulary, per_grammar: int) -> Iterator[tuple[str, Grammar, bytes]]:
    """Yield typical texts, then random ones, with the regular grammars that accept them."""
    specs = {name: JsonSchema(schema) for name, schema in _constraints.CLOSED.items()}
    patterns = {name: Regex(pattern) for name, pattern in _constraints.PATTERNS.items()}
    for name, spec in (specs | patterns).items():
        grammar = Grammar.compile(spec, vocabulary)
        if not isinstance(grammar.compiled, FsmGrammar):
            continue
        for value in ANSWERS.get(name, ()):
            yield name, grammar, compact(value)
        for seed in range(per_grammar):
            yield name, grammar, write(grammar, vocabulary, np.random.default_rng(seed), RANDOM_TOKENS)[0]


@dataclass
class Times:
    """Microseconds of masks, each the best of some replays: other work on the machine empties the caches."""

    structural: list[float] = field(default_factory=list)
    string_body: list[float] = field(default_factory=list)
    wide: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)


REPLAYS = 3


def times_of_masks(vocabulary: Vocabulary, per_grammar: int) -> Times:
    times = Times()
    row = np.zeros(vocabulary.num_words, np.int32)
    for _, grammar, text in texts(vocabulary, per_grammar):
        assert isinstance(grammar.compiled, FsmGrammar)
        dfa = grammar.compiled.dfa
        token_ids = vocabulary.encode(text)
        cold: dict[Place, list[float]] = {}
        sizes: dict[Place, int] = {}
        for _ in range(REPLAYS):
            fresh = FsmGrammar(dfa, vocabulary)  # the same automaton with no masks yet
            matcher = fresh.matcher()
            met: set[Place] = set()
            for token_id in token_ids:
                place = fresh.masks.representative(matcher.place)
                taken = cpu_us(partial(matcher.fill_mask, row))
                if place not in met:
                    met.add(place)
                    cold.setdefault(place, []).append(taken)
                    sizes[place] = int(np.bitwise_count(row.view(np.uint32)).sum())
                times.seen.append(cpu_us(partial(matcher.fill_mask, row)))
                if matcher.advance([token_id]) != 1:
                    break
        for place, samples in cold.items():
            if sizes[place] <= vocabulary.vocab_size // 2:
                times.structural.append(min(samples))
            elif self_loop(dfa, place[0]) is not None:
                times.string_body.append(min(samples))
            else:
                times.wide.append(min(samples))
    return times


def quantiles(name: str, samples: Sequence[float], median: float | None, tail: float | None, **shape: Any) -> list[Row]:
    ordered = sorted(samples)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    shape = {"masks": len(samples), **shape}
    return [
        Row("masks", f"{name}, p50", statistics.median(ordered), "us", floor=median, at_most=True, shape=shape),
        Row("masks", f"{name}, p99", p99, "us", floor=tail, at_most=True, shape=shape),
    ]


@dataclass
class Agreement:
    """Comparison of the native engine's answers, step by step."""

    num_steps: int = 0
    num_xgrammar_steps: int = 0
    masks_unlike_xgrammar: int = 0
    masks_without_llguidances: int = 0
    forced_unlike_llguidance: int = 0
    not_canonical: int = 0


def agreement(vocabulary: Vocabulary) -> Agreement:
    """Replay with jump-forward, beside both libraries."""
    import xgrammar
    from llguidance import LLMatcher
    from llguidance.tiktoken import lltokenizer_from_encoding

    tokenizer = lltokenizer_from_encoding(_vocabularies.encoding("128k"))
    found = Agreement()
    tokens = [token or b"<|endoftext|>" for token in vocabulary.tokens]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[*vocabulary.eos_token_ids])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    for name, grammar, text in texts(vocabulary, 1):
        written = name in ANSWERS and text in map(compact, ANSWERS[name])
        if written:
            schema = json.dumps(_constraints.CLOSED[name])
            source = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            compiled = compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        elif name in _constraints.PATTERNS and name != "unicode":  # whose \w holds marks in Rust, and not in Python
            source = LLMatcher.grammar_from_regex(_constraints.PATTERNS[name])
            compiled = compiler.compile_regex(_constraints.PATTERNS[name]) if name in XGRAMMAR_PATTERNS else None
        else:
            continue  # the two read other keywords of schemas in ways of their own
        theirs = LLMatcher(tokenizer, source, log_level=0)
        replay(found, grammar, text, vocabulary, theirs, xgrammar.GrammarMatcher(compiled) if compiled else None)
    return found


def replay(
    found: Agreement,
    grammar: Grammar,
    text: bytes,
    vocabulary: Vocabulary,
    theirs: Any,
    xgrammar_matcher: Any,
) -> None:
    import llguidance.numpy
    import xgrammar

    ours = grammar.matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    rows = llguidance.numpy.allocate_token_bitmask(1, vocabulary.vocab_size)
    bitmask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    canonical = vocabulary.encode(text)
    ids: list[int] = []
    while len(vocabulary.decode(ids)) < len(text):
        ours.fill_mask(row)
        llguidance.numpy.fill_next_token_bitmask(theirs, rows, 0)
        found.num_steps += 1
        found.masks_without_llguidances += bool((rows[0] & ~row).any())
        if xgrammar_matcher is not None:
            xgrammar_matcher.fill_next_token_bitmask(bitmask, 0)
            found.num_xgrammar_steps += 1
            found.masks_unlike_xgrammar += not np.array_equal(bitmask.numpy()[0], row)
        forced = ours.forced(ids)
        found.forced_unlike_llguidance += forced != theirs.compute_ff_tokens()
        next_ids = forced or canonical[len(ids) : len(ids) + 1]
        ids += next_ids
        if ids != canonical[: len(ids)]:
            found.not_canonical += 1
            return
        assert ours.advance(next_ids) == len(next_ids)
        for token_id in next_ids:
            assert theirs.consume_token(token_id)
            assert xgrammar_matcher is None or xgrammar_matcher.accept_token(token_id)


def run(options: Options) -> Sequence[Row]:
    vocabulary = _vocabularies.vocabulary("128k")
    vocabulary.prepare()
    per_grammar = options.choose(1, 5)
    times_of_masks(vocabulary, 1)  # loads the compiled loops and builds the slices
    times = times_of_masks(vocabulary, per_grammar)
    size = {"vocabulary": vocabulary.vocab_size}
    copy = np.zeros(vocabulary.num_words, np.int32)
    plain = statistics.median(cpu_us(partial(np.copyto, copy, copy.copy())) for _ in range(1000))
    found = agreement(vocabulary)
    rows = [
        *quantiles("seen before, with the copy", times.seen, 1 + plain, None, **size),
        *quantiles("cold, structural", times.structural, 5, None, **size),
        *quantiles("cold, string body", times.string_body, 100, 300, **size),
        *quantiles("cold, wide without a repeat", times.wide, None, None, **size),
        Row("masks", "unlike xgrammar's", found.masks_unlike_xgrammar, "masks", floor=0, at_most=True,
            shape={"masks": found.num_xgrammar_steps}),
        Row("masks", "that lack tokens of llguidance's", found.masks_without_llguidances, "masks", floor=0,
            at_most=True, shape={"masks": found.num_steps}),
        Row("masks", "forced tokens unlike llguidance's", found.forced_unlike_llguidance, "steps", floor=0,
            at_most=True, shape={"steps": found.num_steps}),
        Row("masks", "texts with other than canonical tokens", found.not_canonical, "texts", floor=0, at_most=True),
    ]  # fmt: skip
    return rows
