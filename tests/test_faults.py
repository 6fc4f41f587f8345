from __future__ import annotations

from tests.faults import InjectedFault, failing


class Part:
    def work(self) -> str:
        return "done"


def outcomes(part: Part) -> list[str]:
    answers = []
    for _ in range(6):
        try:
            answers.append(part.work())
        except InjectedFault:
            answers.append("failed")
    return answers


def test_every_nth_call_fails_and_afterwards_none() -> None:
    part = Part()
    with failing(part, "work", every=3) as failed:
        assert outcomes(part) == ["done", "done", "failed"] * 2
    assert failed == [3, 6] and "work" not in vars(part)
    assert outcomes(part) == ["done"] * 6


def test_one_call_alone_may_fail() -> None:
    part = Part()
    with failing(part, "work", every=2, once=True):
        assert outcomes(part) == ["done", "failed", *["done"] * 4]
