"""The flags of a regex, as in (?i) and (?s:...)."""

from __future__ import annotations

from dataclasses import dataclass, replace

NAMES = {"i": "ignore_case", "s": "dot_all", "m": "multiline", "x": "verbose", "a": "ascii_only"}


@dataclass(frozen=True)
class Flags:
    ignore_case: bool = False
    dot_all: bool = False
    multiline: bool = False
    verbose: bool = False
    ascii_only: bool = False

    def changed(self, letter: str, value: bool) -> Flags | None:
        """These flags with that of `letter` set to `value`; None for a letter that is no flag."""
        if letter == "u":
            return replace(self, ascii_only=False)
        return replace(self, **{NAMES[letter]: value}) if letter in NAMES else None
