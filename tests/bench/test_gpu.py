"""The comparison on a GPU, without one: workloads on a scripted engine, limits and ratios by hand, missing engines."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.gpu import compare, families, measure, report, sanitize, shapes
from bench.gpu.limits import Decoder, Limits, Rates, limits, pairs
from bench.gpu.model import CONFIG, learn_tokenizer
from bench.gpu.published import PUBLISHED, fitted, layers_that_fit
from bench.gpu.workloads import Answer, Draw, Ids, Sizes, decode, sections
from bench.harness import ROOT

SMALL = Sizes().divided(16, (3, 250))


class Scripted:
    """Answers with as many tokens as are asked for, and remembers what it was asked since the last flush."""

    def __init__(self, short_by: int = 0) -> None:
        self.short_by = short_by
        self.calls: list[tuple[list[Ids], int, bool]] = []
        self.seen: set[tuple[int, ...]] = set()

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        self.calls.append(([list(p) for p in prompts], max_tokens, schema is not None))
        answers = [Answer([9] * (max_tokens - self.short_by), self._cached(p), '{"a": 1}') for p in prompts]
        self.seen |= {tuple(p) for p in prompts}
        return answers

    def flush(self) -> None:
        self.seen.clear()

    def _cached(self, prompt: Ids) -> int:
        return max((len(s) for s in self.seen if tuple(prompt[: len(s)]) == s), default=0)


def test_prompts_depend_on_the_seed_alone() -> None:
    assert Draw(100, Sizes()).ids(4) == Draw(100, Sizes()).ids(4) != Draw(101, Sizes()).ids(4)
    assert Draw(100, Sizes()).several(2, 3) == [[r[0], r[1], r[2]] for r in Draw(100, Sizes()).several(2, 3)]


def test_each_section_asks_what_its_name_says() -> None:
    asked: dict[str, list[tuple[int, int, int, bool]]] = {}
    for name, section in sections(replace(Sizes(), rounds=1)).items():
        engine = Scripted()
        section(engine)
        asked[name] = [(len(prompts), len(prompts[0]), new, schema) for prompts, new, schema in engine.calls]
    assert asked["a64"] == [(64, 512, 1, False), (64, 512, 128, False)]
    assert asked["b"] == [(256, 2064, 16, False)]
    assert asked["c"] == [(64, 656, 64, False), (64, 736, 64, False), (64, 816, 64, False)]
    assert asked["d"] == [(32, 256 + 320 * turn, 64, False) for turn in range(4)]
    assert asked["e"] == [(1, 64, 96, True), (64, 128, 96, True), (64, 128, 96, False)]
    assert asked["f"] == [(8, 8192, 1, False)]
    assert asked["g"] == [(4, 16_000, 1, False)]


def test_branches_and_turns_go_on_from_what_was_written() -> None:
    found = {name: section(Scripted()) for name, section in sections(SMALL).items()}
    said, answered = SMALL.said, SMALL.answer
    cached = sum(said + turn * (said + answered) for turn in range(3))  # the whole prompt of the turn before
    asked = sum(said + turn * (said + answered) for turn in range(4))
    assert found["d"]["hit_rate"] == pytest.approx(cached / asked)
    assert found["c"]["requests_per_s"] > 0
    assert found["e"]["whole_texts"] == found["e"]["texts"] == SMALL.documents


def test_an_engine_that_writes_too_little_has_no_decode_figure() -> None:
    with pytest.raises(ValueError, match="7 tokens were written, 8 were asked for"):
        decode(Scripted(short_by=1), SMALL, batch=1)


def test_a_failing_section_leaves_the_others_their_figures(tmp_path: Path) -> None:
    kept = measure.Report(tmp_path / "figures.json", "vllm")

    def refuse() -> dict[str, float]:
        raise NotImplementedError("not here")

    kept.run("a1", lambda: {"ms_per_step": 4.0})
    kept.run("e", refuse)
    kept.run("f", lambda: {"ms_per_step": 1 / 0})
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["figures"] == {"a1": {"ms_per_step": 4.0}}
    assert found["errors"] == {"e": "not here", "f": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize(
    ("name", "only", "expected"),
    [
        ("a64", None, True),
        ("a64", "a,b", True),
        ("a64", "a16", False),
        ("strict", "s", False),
        ("start", "strict", False),
    ],
)
def test_sections_are_chosen_by_letter_or_name(name: str, only: str | None, expected: bool) -> None:
    assert measure.wanted(name, only) is expected


# -- limits -------------------------------------------------------------------------------------------------------


def test_a_llama_of_eight_billion_weights_is_counted_as_such() -> None:
    decoder = Decoder.of(CONFIG)
    assert decoder.layers + 2 * decoder.head == pytest.approx(8.03e9, rel=1e-3)  # embeddings are as large as the head
    assert decoder.kv_bytes == 131_072


def test_a_step_takes_the_longer_of_reading_and_multiplying_then_reads_its_cache() -> None:
    card = Limits(Decoder(layers=100, head=50, kv_bytes=10, attention=4), Rates(bytes_per_s=10, operations_per_s=100))
    assert card.products(1, 1) == 300 / 10  # 150 weights of two bytes, read once
    assert card.products(20, 20) == 2 * 150 * 20 / 100
    assert card.step(1, num_cached=7) == 30 + 7 * 10 / 10
    assert card.prefill(1, num_pairs=25, num_logits=0) == 20 + 25 * 4 / 100


def test_a_token_looks_at_itself_and_all_before_it() -> None:
    assert pairs(past=0, new=3) == 1 + 2 + 3
    assert pairs(past=10, new=2) == 11 + 12


def test_the_limits_on_the_card_of_the_notes_are_those_written_there() -> None:
    best = limits(Decoder.of(CONFIG), Rates(4.3e12, 790e12), Sizes())
    steps = [best[f"a{batch}"]["ms_per_step"] for batch in (1, 16, 64, 256)]
    assert steps == pytest.approx([3.51, 3.77, 4.61, 9.36], abs=0.01)
    assert best["b"]["requests_per_s"] == pytest.approx(594, abs=1)


# -- the table ----------------------------------------------------------------------------------------------------

FOUND: dict[str, Any] = {
    "engines": {
        "graftlm": {"figures": {"a1": {"ms_per_step": 4.0}, "f": {"tokens_per_s": 40_000}}, "errors": {}},
        "vllm": {"figures": {"a1": {"ms_per_step": 5.0}, "f": {"tokens_per_s": 38_000}}, "errors": {}},
        "sglang": {"figures": {"a1": {"ms_per_step": 4.8}}, "errors": {"f": "ValueError: no"}},
        "hf": {"figures": {}, "errors": {"start": "not measured"}},
    },
    "limits": {"a1": {"ms_per_step": 3.5}, "f": {"tokens_per_s": 50_000}},
}


def test_ratios_say_how_many_times_as_fast_we_are() -> None:
    found = {figure.what: (to_peer, of_limit) for figure, _, to_peer, of_limit in report.rows(FOUND)}
    assert found["decode, batch 1"] == (pytest.approx(1.2), pytest.approx(0.875))
    assert found["prefill 8 x 8,192"] == (pytest.approx(40 / 38), pytest.approx(0.8))


def test_the_table_says_what_is_missing_and_that_peers_are_cut_down() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(FOUND, console)
    text = console.export_text()
    assert "sglang, f: ValueError: no" in text and "hf, start: not measured" in text
    assert "cut-down builds, not the stock packages" in text


def test_a_row_of_the_documentation() -> None:
    heading, line, *rows = report.markdown(FOUND)
    assert heading.startswith("| what | GraftLM | vLLM | SGLang |") and line.count("|") == heading.count("|")
    assert rows[0] == "| decode, batch 1, ms/step | 4.00 | 5.00 | 4.80 |  | 1.20x | 3.50 | 88 % |"


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--engines", "graftlm"])
    assert "run this on a machine with an NVIDIA GPU" in capsys.readouterr().err


def test_an_unknown_engine_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--engines", "trt"])
    assert "no engine 'trt'; known: graftlm, vllm, sglang, hf, hf_batching" in capsys.readouterr().err


def test_a_peer_sees_its_own_tree_and_the_benchmark_only(tmp_path: Path) -> None:
    (tmp_path / "site_vllm").mkdir()
    environment = {"PYTHONPATH": "/elsewhere"}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert compare.place("vllm", tmp_path, environment, scratch) is None
    site, bench = environment["PYTHONPATH"].split(os.pathsep)
    assert site == str(tmp_path / "site_vllm") and os.listdir(bench) == ["bench"]
    assert "no site_sglang" in (compare.place("sglang", tmp_path, environment, scratch) or "")
    assert "--peers" in (compare.place("vllm", None, environment, scratch) or "")


def test_a_trial_run_on_any_machine_measures_us_and_names_what_is_missing(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    arguments = ["--tiny", "--engines", "graftlm,vllm", "--only", "a1,e", "--json", str(written)]
    assert compare.main(arguments) == 0
    found = json.loads(written.read_text())
    assert set(found["engines"]["graftlm"]["figures"]) == {"start", "warm-up", "a1", "e"}
    assert found["engines"]["graftlm"]["figures"]["e"]["whole_texts"] == SMALL.documents
    assert found["engines"]["vllm"]["errors"]["start"].startswith("not measured")
    assert found["caveat"] == report.CAVEAT


@pytest.mark.parametrize(
    ("name", "engines", "page"),
    [
        ("h200", ["graftlm", "vllm"], "docs/gpu-figures.md"),
        ("h200-three", ["graftlm", "vllm", "sglang"], "bench/notes/gpu-figures.md"),
    ],
)
def test_the_kept_figures_make_their_table_again_without_a_gpu(
    name: str, engines: list[str], page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ROOT / f"bench/gpu/{name}.json"
    written = tmp_path / "figures.json"
    assert compare.main(["--engines", "", "--add", str(kept), "--json", str(written)]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H200" in said and report.CAVEAT in said
    found = json.loads(written.read_text())
    assert list(found["engines"]) == engines
    measured = json.loads(kept.read_text())
    assert {key: found[key] for key in ("limits", "commit", "at")} == {
        key: measured[key] for key in ("limits", "commit", "at")
    }
    documented = (ROOT / page).read_text().splitlines()
    assert [line for line in report.markdown(found) if line not in documented] == []


def test_a_tokenizer_is_learnt_from_text_at_hand(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" the cat sat on the mat and the hat" * 20)
    tokenizer = learn_tokenizer([tmp_path], pieces=270, specials=8)
    assert len(tokenizer) == 278
    assert tokenizer.decode(tokenizer.encode(" the hat")) == " the hat"
    assert tokenizer.eos_token_id == 271


# -- the sanitizer ------------------------------------------------------------------------------------------------


def test_a_machine_without_the_sanitizer_is_told_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 2
    assert "comes with the CUDA toolkit" in capsys.readouterr().err


def pretended(folder: Path, status: int, count: int | None) -> Path:
    """A tool that counts so many errors, or says nothing, and ends with this status."""
    tool = folder / "compute-sanitizer"
    summary = "" if count is None else f"echo '========= ERROR SUMMARY: {count} errors'\n"
    tool.write_text(f"#!/bin/sh\n{summary}echo '4 passed in 1.00s'\nexit {status}\n")
    tool.chmod(0o755)
    return tool


@pytest.mark.parametrize(("status", "word"), [(0, "clean"), (86, "status 86")])
def test_what_the_sanitizer_counts_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, word: str
) -> None:
    pretended(tmp_path, status, status)
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sanitize.main(["--tools", "memcheck", "--workers", "3"]) == status
    said = capsys.readouterr().out
    assert f"memcheck: {word}" in said
    assert ("0 found in 3 processes, 12 tests passed" if status == 0 else "ERROR SUMMARY: 86 errors") in said


@pytest.mark.parametrize("count", [3, None])
def test_errors_count_whatever_the_exit_status_is_and_so_does_silence(tmp_path: Path, count: int | None) -> None:
    code, lines = sanitize.check(str(pretended(tmp_path, 0, count)), "memcheck", ())
    assert code == sanitize.FOUND and lines[-1] == "4 passed in 1.00s"


def test_processes_share_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for index in range(3):
        monkeypatch.setenv(sanitize.SHARE, f"{index}/3")
        items = list("abcdefgh")
        sanitize.pytest_collection_modifyitems(items)
        shares.append("".join(items))
    assert shares == ["adg", "beh", "cf"]


def test_one_case_of_each_test_and_dtype_is_the_one_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(name: str, place: int, **arguments: str) -> SimpleNamespace:
        return SimpleNamespace(path="file", originalname=name, at=place, callspec=SimpleNamespace(params=arguments))

    dtypes = ["half", "single", "half", "single", "half"]
    plain = SimpleNamespace(path="file", originalname="plain", at=5)
    items = [*(case("norm", i, dtype=dtype) for i, dtype in enumerate(dtypes)), plain, case("greedy", 6, dtype="half")]
    monkeypatch.setenv(sanitize.FEW, "1")
    sanitize.pytest_collection_modifyitems(items)
    assert [item.at for item in items] == [2, 3, 5, 6]


@pytest.mark.parametrize(("tool", "few"), [("memcheck", ""), ("racecheck", "1"), ("synccheck", "1")])
def test_slow_tools_run_a_few_cases_unless_tests_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, few: str
) -> None:
    path = pretended(tmp_path, 1, 1)
    path.write_text(path.read_text().replace("echo '4", f'echo few="${sanitize.FEW}"; echo \'4'))
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(path))
    for tests, said in (([], f"few={few}\n"), (["tests"], "few=\n")):
        assert sanitize.main(["--tools", tool, "--workers", "1", *tests]) == 1
        assert said in capsys.readouterr().out


def test_the_kernels_that_are_watched_are_those_that_are_launched() -> None:
    assert {"_decode", "_extend", "_norm", "_gemv", "_largest"} < set(sanitize.kernels())


@pytest.mark.parametrize(
    ("divisor", "rows", "expected"), [(1, 1, 1), (1, 32, 32), (100, 1, 1), (100, 32, 2), (100, 300, 3)]
)
def test_as_many_rows_decode_as_are_asked_for(divisor: int, rows: int, expected: int) -> None:
    class Tiny(shapes.Measured):
        def __init__(self) -> None:
            self.divisor = divisor

    assert Tiny().rows(rows) == expected


def test_published_configurations_can_be_built_and_cut() -> None:
    shape = PUBLISHED["deepseek-v2-lite"]
    assert layers_that_fit(shape, 10**12) == 27
    assert 2 <= layers_that_fit(shape, 16 * 10**9) < 27  # 31 GB as a whole
    with pytest.raises(ValueError, match="2 of its layers take"):
        layers_that_fit(shape, 10**9)
    cut = fitted(PUBLISHED["qwen3.5-9b"], 6)
    assert (cut["num_hidden_layers"], len(cut["layer_types"])) == (6, 6)


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "runs on a GPU"), (["llama-9"], "llama-9: not one of llama-3.1-8b")]
)
def test_published_models_need_a_gpu_and_a_known_name(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        families.main(["--real", *arguments])
    assert said in capsys.readouterr().err
