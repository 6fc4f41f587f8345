"""The comparison with other engines on a CPU, with GraftLM alone where none of them is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.cpu import _engines, tokens
from bench.cpu._engines import OURS, Engines, chosen, compared
from bench.cpu._models import Precision, _interleaved, write_gguf, write_random
from bench.cpu.decode import rates_of
from bench.harness import Options
from bench.models import GREEDY, Size, random_ids
from graftlm import Runtime


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engines, "NEEDS", {"OpenVINO": ("no_such_package",)})


@pytest.mark.usefixtures("alone")
def test_a_worker_answers_as_the_runtime_does_and_a_missing_rival_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [random_ids(12, seed=i) for i in range(2)]
    with Engines("tiny", "float32", tmp_path) as engines:
        answer = engines.workers[OURS].ask(prompts, 5)
        rates = rates_of(engines, 2, 4, repeats=1)
    with Runtime(str(tmp_path / "tiny"), device="cpu", dtype="float32") as runtime:
        expected = [list(done.token_ids) for done in runtime.generate(prompts, max_tokens=5, **GREEDY)]
    assert answer["ids"] == expected
    assert answer["peak_mib"] > 100
    assert len(rates[OURS]) == 1
    assert "without OpenVINO: no_such_package is not installed" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("alone")
def test_a_worker_that_dies_says_what_it_printed_last(tmp_path: Path) -> None:
    with (
        Engines("tiny", "float32", tmp_path) as engines,
        pytest.raises(RuntimeError, match=r"(?s)GraftLM ended: .*RequestTooLong"),
    ):
        engines.workers[OURS].ask([random_ids(20_000, seed=0)], 1)


def test_graftlm_stands_beside_the_faster_rival_round_by_round() -> None:
    rates = {OURS: [12.0, 20.0, 9.0], "slow": [5.0, 5.0, 5.0], "fast": [10.0, 10.0, 10.0]}
    *_, ours = compared("decode", "x", rates, 1.1, "tok/s")
    assert (ours.value, ours.baseline, ours.ratio, ours.reached) == (12.0, 10.0, 1.2, True)


def test_a_model_is_picked_by_a_part_of_its_label() -> None:
    floors: dict[tuple[Size, Precision], int] = {("30M", "float32"): 1, ("30M", "bfloat16"): 2, ("450M", "bfloat16"): 3}
    assert [floor for _, floor in chosen(floors, Options())] == [1, 2, 3]
    assert [floor for _, floor in chosen(floors, Options(quick=True))] == [1, 2]
    assert [floor for _, floor in chosen(floors, Options(quick=True, model="443M"))] == [3]
    with pytest.raises(SystemExit, match=r"'7B' is in none of: 28M float32, 28M bfloat16, 443M bfloat16"):
        chosen(floors, Options(model="7B"))


def test_rows_of_a_head_are_in_pairs_for_llama_cpp() -> None:
    weight = torch.arange(8.0)[:, None]  # two heads of four: halves (0, 1) and (2, 3) become pairs
    assert _interleaved(weight, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gguf_file_holds_every_weight(tmp_path: Path, precision: str) -> None:
    gguf = pytest.importorskip("gguf")
    model = write_random("tiny", tmp_path)
    read = gguf.GGUFReader(write_gguf(model, "float32" if precision == "float32" else "bfloat16"))
    names = {tensor.name for tensor in read.tensors}
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"} <= names


def test_tokens_of_llama_cpp_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    monkeypatch.setenv("GRAFTLM_BENCH_MODELS", str(tmp_path))
    rows = tokens.run(Options(quick=True))
    assert all(row.value >= tokens.REQUESTS - 1 for row in rows)  # another order of sums may turn a tie
