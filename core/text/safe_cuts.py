"""Safe cuts: the positions of a text at which encoding the pieces one by one gives the ids of the whole text.

A cut lies between an ASCII letter and a space or newline, or behind a special token. Whether it is safe is read from
the tokenizer's own description (tokenizer.json): every part of it either always separates the two sides, or treats
each side as it would treat it alone. What is not known to do so allows no cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graftlm.core.text.split_pattern import GPT2, LETTERS, SplitPattern, UnknownPattern

_BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a"}
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled"}
"""They rewrite single characters or a character with its marks; a letter and what follows it never become one."""
_AT_WHITESPACE = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}


class _At(Enum):
    """What a pre-tokenizer does between a letter and the character behind it."""

    SPLITS = "always ends a word there"
    NEUTRAL = "handles the two sides as it would handle each alone, but may keep them in one word"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class SafeCuts:
    """The places of a text where it may be cut.

    pattern   a text may be cut where a match ends: behind a letter (the match is empty) or a special token.
    specials  the special tokens before and behind which a text may be cut.
    restarts  whether text behind a special token is encoded as at the start of a text (with the space that some
              tokenizers put there) rather than as text that goes on.
    resets    matches the tokens behind which text restarts; text that goes on must hold none of them.
              None where restarting makes no difference.
    """

    pattern: re.Pattern[str] | None  # None where no text may be cut
    specials: frozenset[str] = frozenset()
    restarts: bool = True
    resets: re.Pattern[str] | None = None

    def next(self, text: str, start: int) -> tuple[int, bool] | None:
        """The first cut at `start` or later, and whether a special token ends there; None where no cut follows."""
        found = self.pattern.search(text, start) if self.pattern is not None else None
        if found is None or found.end() >= len(text):
            return None
        return found.end(), found.end() > found.start()

    def next_reset(self, text: str, start: int, end: int) -> tuple[int, bool] | None:
        """Where the first such token in text[start:end] begins, and whether the text may be cut there."""
        found = self.resets.search(text, start, end) if self.resets is not None else None
        return None if found is None else (found.start(), found[0] in self.specials)


def read_safe_cuts(backend: Any, likely_specials: Iterable[str] = (), *, puts_space: bool = False) -> SafeCuts:
    """Find where texts may be cut for a tokenizer's core (a `tokenizers.Tokenizer`), from its own description.

    likely_specials  tokens that prompts may hold, such as those of the chat template. Cuts are looked for around those
                     that are special tokens of the tokenizer.
    puts_space       whether the tokenizer puts a space before a text.
    """
    spec = description(backend)
    added = spec["added_tokens"]
    restarts = not _prepends_first_only(spec["pre_tokenizer"])
    unseen = puts_space and restarts and any(token["normalized"] for token in added)  # they may be written otherwise
    behind = [] if unseen else [after for after in (" ", "\n") if _is_safe(spec, backend, after)]
    specials = _cuttable_specials(added, set(likely_specials)) if _keeps_segments(spec) else []
    ways = [_any_of(specials)] if specials else []
    if behind:
        # What follows is ASCII and no space: no mark that a normalizer would join with the space, and no run of spaces.
        ways.append(f"(?<=[A-Za-z])(?=[{''.join(behind)}][!-~])")
    return SafeCuts(
        pattern=re.compile("|".join(ways)) if ways else None,
        specials=frozenset(specials),
        restarts=restarts,
        resets=re.compile(_any_of(token["content"] for token in added)) if puts_space and restarts and added else None,
    )


def _any_of(contents: Iterable[str]) -> str:
    """A pattern that takes the longest of those texts that begin at the same place, as added tokens are found."""
    return "|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True))


def description(backend: Any) -> dict[str, Any]:
    """What tokenizer.json says, without the model: its vocabulary takes long to read and is seldom asked for."""

    def part(component: Any) -> Any:
        return None if component is None else json.loads(component.__getstate__())

    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = backend.get_added_tokens_decoder().values()
    return {
        "normalizer": part(backend.normalizer),
        "pre_tokenizer": part(backend.pre_tokenizer),
        "added_tokens": [{name: getattr(token, name) for name in names} for token in added],
    }


def _is_safe(spec: dict[str, Any], backend: Any, after: str) -> bool:
    if any(_added_token_spans(token, after) for token in spec["added_tokens"]):
        return False
    image = _normalized(spec["normalizer"], after)
    if image is None:
        return False
    at, image = _pre_tokenized(spec["pre_tokenizer"], image)
    if at is _At.UNKNOWN or getattr(backend.model, "dropout", None):
        return False
    return at is _At.SPLITS or _bpe_never_joins(json.loads(backend.to_str())["model"], image)


def _added_token_spans(token: dict[str, Any], after: str) -> bool:
    content = token["content"]
    inside = re.search(r"[A-Za-z][\s\u2581]", content) is not None
    takes_space = token["rstrip"] and content[-1:] in LETTERS
    return inside or takes_space or (token["single_word"] and content[:1].isspace())


# -- normalizers -----------------------------------------------------------------------------------------------


def _normalized(spec: dict[str, Any] | None, after: str) -> str | None:
    """What `after` becomes behind a letter; None if a normalizer may look at both sides of the cut."""
    if spec is None:
        return after
    kind = spec["type"]
    if kind == "Sequence":
        image: str | None = after
        for inner in spec["normalizers"]:
            image = _normalized(inner, image) if image is not None else None
        return image
    if kind == "Replace":
        return _replaced(spec["pattern"], spec["content"], after)
    if kind == "ByteLevel":
        return _BYTE_LEVEL.get(after, after)
    if kind == "Strip":
        return None if spec["strip_left"] else after
    # The space that Prepend puts before a text is left out where text goes on: see Tokenizer.encode_continuation.
    if kind == "Prepend" or kind in _LOCAL_NORMALIZERS:
        return after
    return None


def _replaced(pattern: dict[str, str], content: str, after: str) -> str | None:
    literal = pattern.get("String")
    if literal == after:
        return content if len(content) == 1 else None
    if literal is not None:
        unrelated = not (set(literal) & (LETTERS | {after}))
        return after if unrelated else None
    return after if _read(pattern["Regex"], after, lambda read: not read.matches_beside) else None


# -- pre-tokenizers --------------------------------------------------------------------------------------------


def _pre_tokenized(spec: dict[str, Any] | None, after: str) -> tuple[_At, str]:
    """What a pre-tokenizer does at the cut, and what `after` is for those that come later."""
    if spec is None:
        return _At.NEUTRAL, after
    kind = spec["type"]
    if kind == "Sequence":
        found = _At.NEUTRAL
        for inner in spec["pretokenizers"]:
            at, after = _pre_tokenized(inner, after)
            if at is _At.UNKNOWN:
                return at, after
            found = _At.SPLITS if _At.SPLITS in (found, at) else found
        return found, after
    if kind == "ByteLevel":
        at = _searched(GPT2, after, splits=True) if spec.get("use_regex", True) else _At.NEUTRAL
        return at, _BYTE_LEVEL.get(after, after)
    if kind == "Metaspace":
        mark = spec["replacement"]
        if after not in (" ", mark):
            return _At.NEUTRAL, after
        return (_At.SPLITS if spec.get("split", True) else _At.NEUTRAL), mark
    if kind in _AT_WHITESPACE:
        return (_At.SPLITS if after.isspace() else _At.UNKNOWN), after
    if kind == "CharDelimiterSplit":
        return (_At.SPLITS if spec["delimiter"] == after else _At.NEUTRAL), after
    if kind in ("Digits", "Punctuation"):
        return _At.NEUTRAL, after
    if kind == "Split":
        literal = spec["pattern"].get("String")
        pattern = re.escape(literal) if literal is not None else spec["pattern"]["Regex"]
        kept_apart = spec["behavior"] == "Isolated" or spec["behavior"] == "Removed"
        return _searched(pattern, after, splits=kept_apart), after
    return _At.UNKNOWN, after


def _searched(pattern: str, after: str, *, splits: bool) -> _At:
    """What splitting at the matches of a pattern does. `splits` tells whether each match becomes a word of its own."""
    if not _read(pattern, after, lambda read: read.respects_cut):
        return _At.UNKNOWN
    if not splits:  # matches are joined with their neighbours: harmless where no match touches the cut
        return _At.UNKNOWN if _read(pattern, after, lambda read: read.matches_beside) else _At.NEUTRAL
    return _At.SPLITS if _read(pattern, after, lambda read: read.always_matches) else _At.NEUTRAL


def _read(pattern: str, after: str, ask: Callable[[SplitPattern], bool]) -> bool:
    try:
        read = SplitPattern.read(pattern, after)
    except UnknownPattern:
        return False
    return read.respects_cut and ask(read)


# -- models ----------------------------------------------------------------------------------------------------


def _bpe_never_joins(model: dict[str, Any], after: str) -> bool:
    """Whether byte-pair encoding never merges a letter with `after`: no token holds the two side by side.

    Merges on one side of such a pair depend on nothing that stands on the other.
    """
    if model["type"] != "BPE" or model.get("ignore_merges"):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    vocab = model["vocab"]
    if after not in vocab or not vocab.keys() >= LETTERS:  # an unknown character may be joined with the next one
        return False
    side_by_side = re.compile("[A-Za-z]" + re.escape(after))
    return side_by_side.search("\0".join(vocab)) is None


# -- special tokens --------------------------------------------------------------------------------------------


def _keeps_segments(spec: dict[str, Any]) -> bool:
    """Whether text behind a special token is normalized as a text of its own is (a stripped space would be lost)."""
    return '"Strip"' not in json.dumps(spec["normalizer"])


def _prepends_first_only(spec: dict[str, Any] | None) -> bool:
    if spec is None:
        return False
    if spec["type"] == "Sequence":
        return any(_prepends_first_only(inner) for inner in spec["pretokenizers"])
    return spec["type"] == "Metaspace" and spec.get("prepend_scheme") == "first"


def _cuttable_specials(added: list[dict[str, Any]], likely: set[str]) -> list[str]:
    """Those of `likely` that are special tokens wherever they stand, whatever text is around them."""
    contents = [token["content"] for token in added]
    joined = "\0".join(contents)
    endings = {content[i:] for content in contents for i in range(1, len(content))}

    def fixed(token: dict[str, Any]) -> bool:
        content = token["content"]
        plain = not (token["normalized"] or token["lstrip"] or token["rstrip"] or token["single_word"])
        alone = joined.count(content) == 1  # no other token holds it
        begun_before = any(content[:i] in endings for i in range(1, len(content)))
        return bool(content) and plain and alone and not begun_before

    return [token["content"] for token in added if token["special"] and token["content"] in likely and fixed(token)]
