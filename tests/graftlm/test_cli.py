"""The command line, through its own entry point."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graftlm import cli
from graftlm.ab import report
from graftlm.core.errors import ConfigError
from graftlm.kernels.cpu.compiled import loop_cache, object_code
from tests.models import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def call(*arguments: str, stdin: str | None = None) -> str:
    """What the command prints to standard output."""
    done = CliRunner().invoke(cli.app, list(arguments), input=stdin, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_plugins_lists_the_built_ins() -> None:
    (first, *_) = json.loads(call("plugins", "--json"))
    assert first["plugin"] == "graftlm"
    assert ("attention", "torch") in {(offer["kind"], offer["name"]) for offer in first["offers"]}
    assert "torch" in call("plugins")


def test_info_tells_versions_and_machine() -> None:
    found = json.loads(call("info", "--json"))
    assert found["cores"] >= 1
    assert found["torch"].split(".")[0] == "2"
    assert "transformers" in call("info")


def test_generate_streams_the_same_text_that_json_gives(model: str) -> None:
    arguments = ("generate", "Hello", "--model", model, "--max-tokens", "5")
    answer = json.loads(call(*arguments, "--json"))
    assert answer["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 5}
    assert call(*arguments) == answer["text"] + "\n"


def test_generate_reads_the_prompt_from_standard_input(model: str) -> None:
    assert call("generate", "-", "--model", model, "--max-tokens", "5", stdin="Hello") == call(
        "generate", "Hello", "--model", model, "--max-tokens", "5"
    )


def test_warm_keeps_what_a_first_process_computes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_code, "_archives", lambda *_: ())
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path))
    loop_cache.folder.cache_clear()
    told = json.loads(call("warm", model, "--json"))
    loop_cache.folder.cache_clear()
    assert told["folder"] == str(tmp_path) and told["bytes"] > 10_000
    kept = {"cpu-loops/*/*.loop": 8, "known-models/*.record": 1, "known-tokenizers/*.record": 1}
    assert {pattern: len(list(tmp_path.glob(pattern))) for pattern in kept} == kept


def test_warm_without_a_folder_says_where_it_must_be(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", "")
    with pytest.raises(ConfigError, match="GRAFTLM_CACHE_DIR"):
        call("warm", model)


def test_ab_prints_a_table_and_writes_a_report(tmp_path: Path) -> None:
    pipeline = tmp_path / "shout.py"
    pipeline.write_text(
        "def low(model): return str.lower\n"
        "def high(model): return str.upper\n"
        "def run(llm, inputs): return [llm(text) for text in inputs]\n"
        "def inputs(): return ['a', 'B']\n"
    )
    out = call("ab", str(pipeline), "--engines", "low,high", "--minutes", "0.01", "--report", str(tmp_path / "out"))
    assert "0/1" in out and "high answers 1 of 1 inputs differently." in out
    assert (tmp_path / "out/chart.png").is_file()


def test_ab_writes_the_page_without_matplotlib_and_says_that_the_chart_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = tmp_path / "shout.py"
    pipeline.write_text("def low(model): return str.lower\ndef run(llm, inputs): return [llm('A') for _ in inputs]\n")
    monkeypatch.setattr(report, "can_draw", lambda: False)
    options = ("--engines", "low", "--minutes", "0.01", "--report", str(tmp_path / "out"))
    result = CliRunner().invoke(cli.app, ["ab", str(pipeline), *options])
    assert "chart.png was left out, which needs matplotlib: pip install matplotlib" in result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.csv", "report.html", "report.json"]
    with pytest.raises(ConfigError, match="chart.png needs matplotlib: pip install matplotlib"):
        call("ab", str(pipeline), *options, "--force", "--chart")


def test_ab_looks_at_the_report_folder_before_it_runs_anything(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="holds files already"):
        call("ab", "no_such_file.py", "--report", str(tmp_path))


def test_the_version_is_that_of_the_package() -> None:
    assert call("--version") == f"graftlm {version('graftlm')}\n"


def test_an_error_is_one_line_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"no_such_file_{90 * 'x'}.py"
    monkeypatch.setattr(sys, "argv", ["graftlm", "ab", name])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: pipeline '{name}' cannot be read")
    assert error.count("\n") == 1


def test_a_missing_package_used_to_end_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(sys, "argv", ["graftlm", "info"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    assert "the package 'psutil' is not installed; run: pip install psutil" in capsys.readouterr().err


def test_info_says_how_a_model_would_run_without_its_weights(model: str, tmp_path: Path) -> None:
    assert json.loads(call("info", "--model", model, "--json"))["execution"].startswith("paged, ")
    described = json.loads((Path(model) / "config.json").read_text())
    described |= {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    said = json.loads(call("info", "--model", str(tmp_path), "--json"))["execution"]
    assert said.startswith("serial: ") and "attend" in said


def test_grammar_explain_says_what_becomes_of_a_schema(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}')
    assert "kept by fsm" in call("grammar", "explain", str(schema))
    assert json.loads(call("grammar", "explain", str(schema), "--json"))["engine"] == "fsm"


def test_grammar_explain_exits_with_1_for_a_schema_that_is_refused(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer", "minimun": 3}')
    done = CliRunner().invoke(cli.app, ["grammar", "explain", str(schema)])
    assert done.exit_code == 1
    assert 'the nearest schema that would be taken: {"type": "integer", "minimum": 3}' in done.output


def test_a_schema_that_is_not_utf8_used_to_end_in_a_traceback(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes('{"enum": ["é"]}'.encode("latin-1"))
    done = CliRunner().invoke(cli.app, ["grammar", "explain", str(schema)])
    assert isinstance(done.exception, ConfigError)
    assert "is not UTF-8: byte 0xe9 at offset 11" in str(done.exception)
    schema.write_bytes(b"\xef\xbb\xbf" + b'{"enum": ["e"]}')
    assert "kept by fsm" in CliRunner().invoke(cli.app, ["grammar", "explain", str(schema)]).output


def test_an_error_keeps_its_text_in_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConfigError("pip install 'graftlm[images]', not [/red]")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "ConfigError: pip install 'graftlm[images]', not [/red]\n"
