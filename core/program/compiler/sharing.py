"""Sharing: where prompts stop sharing their prefix, why, and the order of their blocks that would share more.

A block is a paragraph of a message, or a part that was declared with `gl.part`. A block that every prompt has is
constant. The proposed order has constant blocks first, then blocks by how many prompts have them.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.trace import common_length

Message = tuple[str, tuple[str, ...]]
"""A role ("" for plain text) and the blocks of the content, whose concatenation is the content."""

_PARAGRAPH = re.compile(r".*?\n[ \t]*\n\s*|.+", re.DOTALL)
_NOUNS = "document|example|passage|part|paragraph|context|item|message|section|snippet|source"
_REFERENCE = re.compile(
    rf"\b(?:(?:first|second|third|fourth|fifth|last|previous|preceding|next|former|latter|above|following|\d+(?:st|nd|rd|th))"
    rf" (?:{_NOUNS})s?|(?:{_NOUNS})s? (?:above|below|\#?\d+))\b",
    re.IGNORECASE,
)  # fmt: skip


def blocks_of(text: str) -> tuple[str, ...]:
    """Split a text into its paragraphs, or its lines if it has one paragraph. Their concatenation is the text."""
    found = tuple(_PARAGRAPH.findall(text))
    return found if len(found) > 1 else tuple(text.splitlines(keepends=True))


def reference_in(text: str) -> str | None:
    """Return a phrase that refers to another part by its place, such as "the second document"; None without one."""
    found = _REFERENCE.search(text)
    return found[0] if found is not None else None


@dataclass(frozen=True)
class BlockOrder:
    """An order of blocks, learned from a sample of prompts.

    counts     how many prompts of the sample have a block
    places     how many prompts have the block at each position, on average
    """

    counts: Mapping[str, int]
    places: tuple[float, ...]

    @classmethod
    def learn(cls, sample: Sequence[Sequence[str]]) -> BlockOrder:
        counts = Counter(block for blocks in sample for block in dict.fromkeys(blocks))
        length = max((len(blocks) for blocks in sample), default=0)
        columns = [[counts[blocks[i]] for blocks in sample if i < len(blocks)] for i in range(length)]
        ranked = sorted(counts, key=lambda block: -counts[block])
        return cls({block: counts[block] for block in ranked}, tuple(float(np.mean(column)) for column in columns))

    def order(self, blocks: Sequence[str]) -> list[int]:
        """Return the indices of `blocks` in the proposed order; equal blocks keep their order."""
        ranks = {block: rank for rank, block in enumerate(self.counts)}

        def key(i: int) -> tuple[float, int, int]:
            place = self.places[i] if i < len(self.places) else 0.0
            known = self.counts.get(blocks[i])
            return -max(known or 0, place if known is None else 0), ranks.get(blocks[i], len(ranks)), i

        return sorted(range(len(blocks)), key=key)


def joined(blocks: Sequence[str], order: Sequence[int]) -> str:
    """Return blocks in another order; the end of the last block moves to the block that is last now."""
    if not blocks or list(order) == list(range(len(blocks))):
        return "".join(blocks)
    ends = [re.search(r"\s*$", block)[0] for block in blocks]  # type: ignore[index]
    between = next((end for end in ends[:-1] if end), "\n")
    texts = [blocks[i].rstrip() for i in order]
    return "".join(text + (ends[i] or between) for text, i in zip(texts[:-1], order[:-1], strict=True)) + (
        texts[-1] + ends[-1]
    )


def hit_rate(prompts: Sequence[np.ndarray]) -> float:
    """Return the share of prompt tokens that a cache without limit has when each prompt comes after those before it."""
    cached = total = 0
    for i, prompt in enumerate(prompts):
        cached += max((common_length(prompt[:-1], before) for before in prompts[:i]), default=0)
        total += len(prompt)
    return cached / total if total else 0.0


@dataclass(frozen=True)
class Stop:
    """The block at which most prompts stop sharing.

    shared    tokens before it, on average
    constant  tokens of blocks after it that every prompt has
    place     file and line whose text comes just before the block; "" if no source has it
    """

    role: str
    text: str
    others: tuple[str, ...]
    shared: float
    constant: float
    place: str = ""


@dataclass(frozen=True)
class Suggestion:
    """The gain of another order of blocks, computed on sample prompts.

    before, after  share of the prompt tokens that a cache without limit has
    stop           where sharing stops; None if nothing varies, or everything does
    saved_tokens   prompt tokens that need not be computed, over all prompts
    seconds        to compute these tokens, at the rate of the measured prompts; None if no rate is known
    others         the same for prompts of other templates
    num_continued  prompts that continue an earlier one, which are left out
    """

    num_prompts: int
    before: float
    after: float
    stop: Stop | None
    saved_tokens: int
    diff: str
    seconds: float | None = None
    others: tuple[Suggestion, ...] = ()
    num_continued: int = 0

    def timed(self, rate: float) -> Suggestion:
        """Return the suggestion with its seconds, at `rate` computed prompt tokens per second."""
        others = tuple(one.timed(rate) for one in self.others)
        return replace(self, seconds=self.saved_tokens / rate, others=others)

    def __str__(self) -> str:
        texts = [self._text, *(one._text for one in self.others)]
        if self.others:
            texts = [f"template {i} of {len(texts)}: {text}" for i, text in enumerate(texts, 1)]
        if self.num_continued:
            texts.append(f"{self.num_continued} prompts continue an earlier one and were left out")
        return "\n".join(texts)

    @property
    def _text(self) -> str:
        lines = [f"{self.num_prompts} prompts share {self.before:.0%} of their tokens"]
        if self.stop is None or self.saved_tokens <= 0:
            return lines[0] + "; no other order of their blocks shares more"
        where = f"the {self.stop.role} message" if self.stop.role else "the prompt"
        lines.append(f"sharing stops in {where} after {self.stop.shared:,.0f} tokens, at {_short(self.stop.text)}")
        others = ", ".join(_short(other) for other in self.stop.others[:2])
        lines.append(f"  why: this block differs between prompts (also {others})" if others else "  why: it varies")
        lines.append(f"  {self.stop.constant:,.0f} tokens after it are the same in every prompt")
        if self.stop.place:
            lines.append(f"  change: {self.stop.place}")
        time = "" if self.seconds is None else f", about {self.seconds:.2f} s"
        lines.append(f"moved behind what is constant: {self.after:.0%}, {self.saved_tokens:,} tokens fewer{time}")
        return "\n".join([*lines, self.diff])


Encode = Callable[[Sequence[tuple[str, str]]], np.ndarray]
"""Token ids of a prompt of (role, content) messages; role "" is plain text."""

SAME_TEMPLATE = 1 / 4
"""Share of the shorter prompt's text in common blocks from which on two prompts count as made from one template."""


def suggest(
    prompts: Sequence[Sequence[Message]], encode: Encode, sources: Iterable[Path] = (), rate: float | None = None
) -> Suggestion:
    """Find where prompts stop sharing, and the order of blocks that shares more.

    Prompts that continue an earlier one, such as the next turn of a chat, are left out. Prompts of several templates,
    which have hardly a block in common, are compared by template: the result is that of the template which saves most,
    with those of the others in `others`.

    rate  computed prompt tokens per second, for the seconds
    Raises: ConfigError for fewer than two prompts.
    """
    if len(prompts) < 2:
        raise ConfigError(f"{len(prompts)} prompts show no sharing; give at least two")
    ids = [encode(_texts(prompt)) for prompt in prompts]
    first = _without_continuations(ids)
    groups = [group for group in _templates([prompts[i] for i in first]) if len(group) > 1]
    chosen = [[first[i] for i in group] for group in groups] or [first]
    paths = [*sources]
    found = [_suggest([prompts[i] for i in group], [ids[i] for i in group], encode, paths) for group in chosen]
    best, *others = sorted(found, key=lambda one: -one.saved_tokens)
    best = replace(best, others=tuple(others), num_continued=len(prompts) - len(first))
    return best if rate is None else best.timed(rate)


def _suggest(
    prompts: Sequence[Sequence[Message]], old: Sequence[np.ndarray], encode: Encode, sources: Sequence[Path]
) -> Suggestion:
    """Suggest an order for the prompts of one template.

    Within each message constant blocks come first. Varying blocks of an earlier message that constant ones follow
    move to the start of the last message's varying blocks. A constant block at the end of a prompt stays there.
    """
    counts = Counter(block for prompt in prompts for block in {b for _, blocks in prompt for b in blocks})
    moved = [_moved(prompt, counts, len(prompts)) for prompt in prompts]
    new = [encode(one) for one in moved]
    before, after = hit_rate(old), hit_rate(new)
    saved = round(after * sum(map(len, new)) - before * sum(map(len, old)))
    stop = _stop(prompts, counts, old, sources)
    return Suggestion(len(prompts), before, after, stop, saved, _diff(_texts(prompts[-1]), moved[-1]))


def _without_continuations(ids: Sequence[np.ndarray]) -> list[int]:
    """Return the indices of the prompts that do not begin with the whole of an earlier, shorter one."""
    found: list[int] = []
    for i, one in enumerate(ids):
        shorter = (ids[j] for j in found if len(ids[j]) < len(one))
        if not any(common_length(other, one) == len(other) for other in shorter):
            found.append(i)
    return found


def _templates(prompts: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Return the indices of the prompts by template: prompts that have much of their text in common blocks."""
    blocks = [{(role, block) for role, texts in prompt for block in texts} for prompt in prompts]
    sizes = [sum(len(block) for _, block in one) for one in blocks]
    groups: list[list[int]] = []
    for i, mine in enumerate(blocks):
        near = [
            group
            for group in groups
            if any(sum(len(b) for _, b in mine & blocks[j]) > SAME_TEMPLATE * min(sizes[i], sizes[j]) for j in group)
        ]
        groups = [group for group in groups if group not in near] + [sorted([i, *(j for one in near for j in one)])]
    return sorted(groups)


def _texts(prompt: Sequence[Message]) -> list[tuple[str, str]]:
    return [(role, "".join(blocks)) for role, blocks in prompt]


def _moved(prompt: Sequence[Message], counts: Mapping[str, int], num: int) -> list[tuple[str, str]]:
    """Return the messages of a prompt in the proposed order."""
    moving: list[str] = []
    found: list[tuple[str, str]] = []
    for index, (role, blocks) in enumerate(prompt):
        last = index == len(prompt) - 1
        rest = any(counts[b] == num for _, later in prompt[index + 1 :] for b in later)
        kept = blocks
        if not last and rest:
            kept = tuple(b for b in blocks if counts[b] == num)
            moving += [b for b in blocks if counts[b] < num]
        if not last:
            if kept:
                found.append((role, joined(kept, range(len(kept)))))
            continue
        # A generation cue, such as "Answer:", stays at the end
        cue = kept[-1:] if kept and counts[kept[-1]] == num else ()
        body = kept[: len(kept) - len(cue)]
        constant = [b for b in body if counts[b] == num]
        varying = sorted((b for b in body if counts[b] < num), key=lambda b: -counts[b])
        blocks = (*constant, *moving, *varying, *cue)
        texts = [b.rstrip() for b in blocks]
        gap = "\n\n" if any("\n\n" in b for b in blocks) else "\n"
        found.append((role, gap.join(t for t in texts if t)))
    return found


def _stop(
    prompts: Sequence[Sequence[Message]], counts: Mapping[str, int], old: Sequence[np.ndarray], sources: Iterable[Path]
) -> Stop | None:
    """Return the first varying block of the last prompt that a constant one follows."""
    flat = [(role, block) for role, blocks in prompts[-1] for block in blocks]
    index = next((i for i, (_, block) in enumerate(flat) if counts[block] < len(prompts)), None)
    if index is None:
        return None
    role, text = flat[index]
    constant = sum(len(block) for _, block in flat[index:] if counts[block] == len(prompts))
    per_token = sum(len(block) for _, block in flat) / max(1, len(old[-1]))
    shared = float(np.mean([common_length(old[i], old[i - 1]) for i in range(1, len(old))]))
    others: list[str] = []
    for prompt in prompts[:-1]:
        other = next((b for _, blocks in prompt for b in blocks if counts[b] < len(prompts)), None)
        if other is not None and other not in (text, *others):
            others.append(other)
    place = line_of(_common_ends([text, *others]), sources)
    return Stop(role, text, tuple(others), shared, constant / per_token, place)


def _common_ends(texts: Sequence[str]) -> list[str]:
    """Return the texts that all of `texts` begin and end with, then shorter ones: a template's literal is one of them.

    Fields of a DSPy signature, which are headed by [[ ## name ## ]], give their names first.
    """
    first = min(texts, key=len)
    start = next((i for i in range(len(first)) if any(text[i] != first[i] for text in texts)), len(first))
    end = next((i for i in range(len(first)) if any(text[-1 - i] != first[-1 - i] for text in texts)), len(first))
    fields = re.findall(r"\[\[ ## (\w+) ## \]\]", first)
    words, last = first[:start].split(), first[len(first) - end :].split()
    starts = [" ".join(words[:i]) for i in range(len(words), 0, -1)]
    return [*(f"{name}:" for name in fields), *starts, *(" ".join(last[i:]) for i in range(len(last)))]


def line_of(texts: Sequence[str], sources: Iterable[Path]) -> str:
    """Return "FILE:LINE: code" of the first string literal in `sources` that has one of `texts`; "" if none has.

    A text that ends with a colon may also be the name of an annotated field.
    """
    wanted = [text for text in texts if len(text) > 2]
    for path in sources:
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        fields = {
            f"{ast.unparse(node.target)}:": node.lineno for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)
        }
        for text in wanted:
            if text in fields:
                return f"{path}:{fields[text]}: {lines[fields[text] - 1].strip()}"
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and text in node.value:
                    before = node.value[: node.value.index(text)].count("\n")
                    exact = [
                        n for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if text in lines[n - 1]
                    ]
                    number = exact[0] if exact else node.lineno + before
                    return f"{path}:{number}: {lines[number - 1].strip()}"
    return ""


def _diff(before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]) -> str:
    old, new = (
        [line for role, text in one for line in [*([f"[{role}]"] if role else []), *text.splitlines()]]
        for one in (before, after)
    )
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="", n=1))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else text[:57] + "...")


def messages_of(prompt: Any) -> list[Message]:
    """Return a prompt (text, or messages) as messages of blocks. Raises: ConfigError for anything else."""
    if isinstance(prompt, str):
        return [("", blocks_of(prompt))]
    if isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt):
        return [(str(one.get("role", "")), blocks_of(str(one.get("content") or ""))) for one in prompt]
    raise ConfigError(f"{prompt!r} is no prompt of text; give a text or messages of role and content")


def encoder(processor: Any) -> Encode:
    """Return the encoding of a runtime's processor."""

    def encode(messages: Sequence[tuple[str, str]]) -> np.ndarray:
        if any(role for role, _ in messages):
            ids: np.ndarray = processor.encode([{"role": role, "content": text} for role, text in messages]).ids
        else:
            ids = processor.encode("".join(text for _, text in messages)).ids
        return ids

    return encode
