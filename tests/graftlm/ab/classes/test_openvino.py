from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graftlm.ab.classes.openvino import one_call_at_a_time, same_work


class OneRequest:
    """Refuses a call while another one runs, as OpenVINO's models do."""

    def __init__(self) -> None:
        self._free = threading.Lock()

    def generate(self, token: int, *, more: int) -> int:
        if not self._free.acquire(blocking=False):
            raise RuntimeError("Infer Request is busy")
        threading.Event().wait(0.01)
        self._free.release()
        return token + more


def test_threads_wait_for_one_another() -> None:
    model = OneRequest()
    one_call_at_a_time(model)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda token: model.generate(token, more=1), range(16))) == list(range(1, 17))


def test_openvino_has_the_models_precision_and_the_threads_of_all_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to compute a float32 model in bfloat16, on all cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    told = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 3}
    assert same_work(str(tmp_path)) == told
    assert same_work("a/name-on-the-hub") == {"INFERENCE_NUM_THREADS": 3}
