"""Guidance grammars as texts, gens and selects for a model at an endpoint, which accepts no token masks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from graftlm.core.errors import ConfigError
from graftlm.core.program.expression import Gen, Select, Text
from guidance._ast import (
    GrammarNode,
    JoinNode,
    JsonNode,
    LarkNode,
    LiteralNode,
    RegexNode,
    RuleNode,
    SelectNode,
    SpecialToken,
)

Captures = Mapping[str, str | list[str]]
_GREEDY_METHOD = "greedy_token_selection"


@dataclass(frozen=True)
class Part:
    """One step of a grammar: a literal text, or a value and the rule that extracts its captures."""

    expression: Text | Gen | Select
    node: GrammarNode

    @property
    def unlimited(self) -> bool:
        """True for a gen without a token limit."""
        return isinstance(self.expression, Gen) and "max_tokens" not in self.expression.options

    def captures(self, text: str) -> Captures:
        """Return the variables that a value of this part sets."""
        node = self.node
        if isinstance(node, RuleNode) and not _inner_captures(node.value):
            return {} if node.capture is None else {node.capture: [text] if node.list_append else text}
        found = node.match(text, enforce_max_tokens=False)
        named = {} if found is None else found.captures
        return {name: _text(value) for name, value in named.items()}


@lru_cache(maxsize=2048)
def parts_of(node: GrammarNode) -> tuple[Part, ...]:
    """Return the steps of a grammar, in order. Raises ConfigError for a grammar that needs token masks."""
    return tuple(part for piece in _flat(node) for part in _parts(piece))


def _flat(node: GrammarNode) -> Iterator[GrammarNode]:
    if isinstance(node, JoinNode):
        for inner in node.nodes:
            yield from _flat(inner)
    elif isinstance(node, RuleNode) and isinstance(node.value, JoinNode) and _plain(node):
        yield from _flat(node.value)
    elif not node.is_null:
        yield node


def _plain(rule: RuleNode) -> bool:
    """Return True if a rule only names its value."""
    return rule.capture is None and not _limits(rule)


def _limits(rule: RuleNode) -> list[str]:
    """Return the attributes of a rule that affect generation."""
    names = ("temperature", "max_tokens", "stop", "suffix", "stop_capture", "lazy")
    return [name for name in names if getattr(rule, name) not in (None, False)]


def _parts(node: GrammarNode) -> Iterator[Part]:
    if isinstance(node, LiteralNode):
        yield Part(Text(node.value), node)
        return
    options: dict[str, Any] = {}
    name, value = None, node
    if isinstance(node, RuleNode):
        options, name, value = _options(node), node.capture, node.value
    texts = _choices(value)
    if texts is not None and not options:
        yield Part(Select(name, texts, _GREEDY_METHOD), node)
    else:
        yield Part(Gen(name, options={"temperature": 0.0, **options, **_constraint(value)}), node)
    if isinstance(node, RuleNode) and node.suffix is not None:
        yield Part(Text(node.suffix.value), node.suffix)


def _options(rule: RuleNode) -> dict[str, Any]:
    if rule.stop_capture is not None or rule.lazy:
        what = "save_stop_text=" if rule.stop_capture is not None else "lazy"
        raise ConfigError(
            f"gen {rule.capture!r} has {what}, and an endpoint does not tell what stopped it; leave it out, "
            "or use a model in this process"
        )
    options: dict[str, Any] = {}
    if rule.temperature is not None:
        options["temperature"] = rule.temperature
    if rule.max_tokens is not None:
        options["max_tokens"] = rule.max_tokens
    stops = [] if rule.suffix is None else [rule.suffix.value]
    if isinstance(rule.stop, LiteralNode):
        stops.append(rule.stop.value)
    elif rule.stop is not None:
        stops += _stop_texts(rule.capture, str(rule.stop.regex))
    return options | ({"stop": stops} if stops else {})


def _stop_texts(name: str | None, pattern: str) -> list[str]:
    """Return the texts of a stop pattern, as `stop=[...]` quotes them."""
    pieces = re.split(r"(?<!\\)\|", pattern)
    texts = [re.sub(r"\\([\\+*?^$(){}\[\].|])", r"\1", piece) for piece in pieces]
    if any(re.sub(r"([\\+*?^$(){}\[\].|])", r"\\\1", text) != piece for text, piece in zip(texts, pieces, strict=True)):
        raise ConfigError(
            f"gen {name!r} stops at the pattern {pattern!r}, and an endpoint stops at texts only; give stop=[...]"
        )
    return texts


def _choices(node: GrammarNode) -> tuple[str, ...] | None:
    """Return the texts of a select among texts; None for any other node."""
    if not isinstance(node, SelectNode):
        return None
    texts = [one.value for one in node.alternatives if isinstance(one, LiteralNode) and one.value]
    return tuple(texts) if len(texts) == len(node.alternatives) and len(set(texts)) == len(texts) else None


def _constraint(node: GrammarNode) -> dict[str, Any]:
    match node:
        case RegexNode(None):
            return {}
        case RegexNode(str(pattern)):
            return {"regex": pattern}
        case JsonNode():
            return {"json_schema": node.schema or {"type": "object"}}
        case LarkNode():
            return {"grammar": node.lark_grammar}
    texts = _choices(node)
    if texts is not None:
        return {"choices": texts}
    for inner in _descendants(node, set()):
        if isinstance(inner, SpecialToken):
            raise ConfigError(f"the special token {inner.format()} is one of the model's own; at an endpoint use text")
        if isinstance(inner, RuleNode) and (limits := _limits(inner)):
            raise ConfigError(
                f"a gen with {', '.join(limits)}= stands inside a select or a repetition, where only the model's own "
                "tokens could tell its end; append it by itself, or use a model in this process"
            )
    return {"grammar": node.ll_grammar(enforce_max_tokens=False)}


def _descendants(node: GrammarNode, seen: set[int]) -> Iterator[GrammarNode]:
    if id(node) in seen:
        return
    seen.add(id(node))
    yield node
    target = getattr(node, "target", None)
    for inner in (*node.children(), *((target,) if isinstance(target, GrammarNode) else ())):
        yield from _descendants(inner, seen)


def _inner_captures(node: GrammarNode) -> bool:
    return any(isinstance(inner, RuleNode) and inner.capture is not None for inner in _descendants(node, set()))


def _text(value: Any) -> str | list[str]:
    if isinstance(value, Sequence) and not isinstance(value, bytes | str):
        return [str(_text(one)) for one in value]
    return value.decode(errors="ignore") if isinstance(value, bytes) else str(value)
