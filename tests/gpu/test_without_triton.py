"""Triton comes with PyTorch for GPUs only: a laptop has none, and misses nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it is an ImportError from here on
import graftlm as gl

with gl.Runtime("sprout", device={device!r}) as runtime:
    prompt = "Mara is a baker. Mara lives in"
    print(repr(runtime.generate(prompt, max_tokens=4, temperature=0).text))
    print(runtime.generate(prompt, regex="(x|y){{2}}", temperature=0).text in {{"xx", "xy", "yx", "yy"}})
    texts = runtime.generate([prompt] * 2, max_tokens=3, ignore_eos=True, temperature=1, seed=7, logit_bias={{0: 1}})
    print([text.usage.completion_tokens for text in texts], runtime.select(prompt, [" Oslo", " Madrid"]).index)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_works_without_triton(device: str) -> None:
    run = subprocess.run([sys.executable, "-c", _SCRIPT.format(device=device)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    text, *others = run.stdout.splitlines()
    assert text == repr(" Madrid")
    assert others == ["True", "[3, 3] 1"]
    warned = "attention 'torch' is used, more slowly: triton: Triton is not installed" in run.stderr
    assert warned == (device == "cuda"), run.stderr[-3000:]
    assert "serial lane" not in run.stderr
