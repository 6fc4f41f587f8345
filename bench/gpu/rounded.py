"""python -m bench.gpu.rounded: the effect of float8 KV on a model's answers, on the families of `bench sprout`.

The embedded model answers held-out cases greedily on the GPU, once with KV in the model's dtype and once in float8.
Forced text of a case is given as it is, and each learnt part is written after it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.sprout.document import Document
from bench.sprout.folder import write_json
from bench.sprout.mixture import FAMILIES, cases
from bench.sprout.tokenizer import segment_ids
from bench.sprout.wires import PATH, Wires

DTYPES = ("model", "fp8")
POOL = 200_000
"""Tokens of the KV pool: few, so that another process may share the card."""


@dataclass
class Case:
    """The given and the expected tokens of a case, in turn, and the tokens that were written."""

    parts: list[tuple[list[int], bool]]
    given: list[int] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, tokenizer: Any, document: Document) -> Case:
        parts: list[tuple[list[int], bool]] = []
        for index, (ids, learnt) in enumerate(segment_ids(tokenizer, document)):
            wanted = learnt and index >= document.scored
            if parts and parts[-1][1] == wanted:
                parts[-1] = (parts[-1][0] + list(ids), wanted)
            else:
                parts.append((list(ids), wanted))
        if not parts[-1][1]:
            parts.pop()
        return cls(parts)

    @property
    def right(self) -> bool:
        return self.written == [ids for ids, wanted in self.parts if wanted]


def answer(runtime: Any, rows: Sequence[Case]) -> None:
    """Write all parts of all cases, the first parts of all cases together, then the second ones."""
    from graftlm.core.config import SamplingParams
    from graftlm.core.request import Request

    waiting = list(rows)
    while waiting:
        requests = []
        for row in waiting:
            at = 2 * len(row.written)
            row.given += row.parts[at][0]
            params = SamplingParams(temperature=0.0, max_tokens=len(row.parts[at + 1][0]), ignore_eos=True)
            requests.append(Request(list(row.given), params))
        for row, future in zip(waiting, runtime.submit_many(requests), strict=True):
            row.written.append(list(future.result().token_ids))
            row.given += row.written[-1]
        waiting = [row for row in waiting if 2 * len(row.written) < len(row.parts)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many answers are right with each dtype and how many are the same; exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.rounded", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="held-out cases of each family (default 100)")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this family; may be repeated")
    parser.add_argument("--wires", type=Path, default=PATH, help="the file that bench.sprout.wires wrote")
    parser.add_argument("--model", default="sprout", help="a model that `graftlm.Runtime` takes (default sprout)")
    parser.add_argument("--dtypes", nargs=2, default=DTYPES, help="of CacheConfig; default model and fp8")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    from graftlm.core.config import CacheConfig
    from graftlm.core.runtime import Runtime

    wires = Wires.load(given.wires)
    families = given.family or list(FAMILIES)
    documents = {family: cases(family, given.cases, wires) for family in families}
    found: dict[str, list[list[Case]]] = {family: [] for family in families}
    for dtype in given.dtypes:
        began = time.perf_counter()
        with Runtime(given.model, cache=CacheConfig(dtype=dtype, max_tokens=POOL), max_step_tokens=8192) as runtime:
            tokenizer = runtime.tokenizer.hf.backend_tokenizer
            for family in families:
                rows = [Case.of(tokenizer, document) for document in documents[family]]
                answer(runtime, rows)
                found[family].append(rows)
        print(f"CacheConfig(dtype={dtype!r}): {time.perf_counter() - began:.1f} s", flush=True)
    figures: dict[str, Any] = {"dtypes": list(given.dtypes), "families": {}}
    totals = [0, 0, 0]
    print(f"{'':24s} right {given.dtypes[0]:>6s} {given.dtypes[1]:>6s}   same")
    for family, (plain, rounded) in found.items():
        counts = [
            sum(row.right for row in plain),
            sum(row.right for row in rounded),
            sum(a.written == b.written for a, b in zip(plain, rounded, strict=True)),
        ]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        figures["families"][family] = {"cases": len(plain), "right": counts[:2], "same": counts[2]}
        print(f"{family:24s}       {counts[0]:6d} {counts[1]:6d} {counts[2]:6d}   of {len(plain)}")
    whole = sum(len(rows[0]) for rows in found.values())
    figures |= {"cases": whole, "right": totals[:2], "same": totals[2]}
    print(f"{'all':24s}       {totals[0]:6d} {totals[1]:6d} {totals[2]:6d}   of {whole}")
    if given.json:
        write_json(given.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
