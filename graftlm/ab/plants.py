"""`graftlm ab --check`: plant faults into one of two equal engines and show that the comparison finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from graftlm.ab.compare import MINUTES, compare
from graftlm.ab.comparison import Comparison
from graftlm.ab.worker import Plant
from graftlm.progress import Progress


@dataclass(frozen=True)
class Finding:
    """Whether one planted fault was found. `evidence` is what the comparison said."""

    plant: str
    found: bool
    evidence: str


def check(
    pipeline: str | Path,
    engine: str,
    model: str,
    *,
    rounds: int,
    minutes: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    plants: Sequence[Plant] = get_args(Plant),
    framework: str | None = None,
    swap: str | None = None,
    pythons: Mapping[str, str | Path] | None = None,
) -> list[Finding]:
    """Compare `engine` with itself, once per fault that is planted into the second of the two.

    slow            every round takes twice as long: the ratio's interval must lie below 1
    changed answer  one answer is changed: exactly that answer must differ
    cached call     one input is answered from memory: the second engine must have made fewer calls
    """
    findings = []
    for plant in plants:
        compared = compare(
            pipeline,
            [engine, engine],
            model,
            rounds=rounds,
            minutes=(MINUTES if minutes is None else minutes) / len(plants),
            threads=threads,
            progress=progress,
            plants=[None, plant],
            framework=framework,
            swap=swap,
            pythons=pythons,
        )
        found, evidence = _SIGNS[plant](compared)
        findings.append(Finding(plant, found, compared.results[1].error or evidence))
    return findings


def _slow(compared: Comparison) -> tuple[bool, str]:
    counted = compared.counted(compared.results[1])
    ratio = counted.ratio() if counted.pairs else None  # load weighs on an engine and on itself alike
    return ratio is not None and ratio.high is not None and ratio.high < 1, f"ratio {ratio}"


def _changed_answer(compared: Comparison) -> tuple[bool, str]:
    differing = compared.differing(compared.results[1])
    return differing == [0], f"{len(differing or ())} of {len(compared.inputs)} answers differ"


def _cached_call(compared: Comparison) -> tuple[bool, str]:
    one, other = (result.work.calls if result.rounds else None for result in compared.results)
    return one is not None and other is not None and other < one, f"{one} calls against {other}"


_SIGNS: dict[str, Callable[[Comparison], tuple[bool, str]]] = {
    "slow": _slow,
    "changed answer": _changed_answer,
    "cached call": _cached_call,
}
