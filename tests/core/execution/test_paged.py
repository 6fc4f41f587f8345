from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graftlm.core.errors import EngineError
from graftlm.core.execution.paged import AttentionSwitch
from tests.models import tiny_model


def test_a_model_called_beside_a_step_used_to_meet_a_bare_assert() -> None:
    model, ids = tiny_model(), torch.tensor([[1, 2, 3]])
    with ThreadPoolExecutor(1) as other:
        expected = other.submit(model, ids).result().logits
        with (
            AttentionSwitch(model)(lambda call: call.q[0].transpose(0, 1)),
            pytest.raises(EngineError, match="by another thread while a runtime runs the model"),
        ):
            other.submit(model, ids).result()
        assert torch.equal(other.submit(model, ids).result().logits, expected)
