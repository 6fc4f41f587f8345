from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from graftlm.ab.classes.openvino import one_call_at_a_time


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
