"""A second attempt at a stream goes on where the first ended."""

from __future__ import annotations

import pytest

from graftlm.core.cluster.engine import Delivery
from graftlm.core.errors import EngineError
from graftlm.core.request import Chunk


def texts(delivery: Delivery, *chunks: Chunk) -> str:
    return "".join(rest.text for chunk in chunks if (rest := delivery.rest(chunk)) is not None)


def test_what_was_delivered_is_not_delivered_again_however_the_answer_is_cut() -> None:
    delivery = Delivery()
    assert texts(delivery, Chunk("ab", [1]), Chunk("c", [2])) == "abc"
    delivery.again()
    assert delivery.rest(Chunk("abcd", [1, 2, 3])) == Chunk("d", [3])
    assert delivery.rest(Chunk("e", [4], finish_reason="stop")) == Chunk("e", [4], finish_reason="stop")


def test_an_end_without_text_is_delivered() -> None:
    delivery = Delivery()
    delivery.rest(Chunk("ab", [1]))
    delivery.again()
    assert delivery.rest(Chunk("ab", [1], finish_reason="length")) == Chunk("", [], finish_reason="length")


def test_answers_of_one_request_are_kept_apart() -> None:
    delivery = Delivery()
    texts(delivery, Chunk("a", [1], index=0), Chunk("b", [2], index=1))
    delivery.again()
    assert texts(delivery, Chunk("bx", [2, 3], index=1), Chunk("ay", [1, 4], index=0)) == "xy"


def test_another_answer_than_before_is_an_error() -> None:
    delivery = Delivery()
    delivery.rest(Chunk("a", [1]))
    delivery.again()
    with pytest.raises(EngineError, match="differs"):
        delivery.rest(Chunk("b", [2]))
