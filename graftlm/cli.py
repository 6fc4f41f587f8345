"""The command `graftlm`: demo, ab, bench, generate, plugins, info."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from graftlm.core.errors import ConfigError, GraftError
from graftlm.progress import Progress

app = typer.Typer(
    name="graftlm",
    help="A fast language-model runtime under the frameworks you already write in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

if TYPE_CHECKING:
    from graftlm.ab.compare import Comparison

AsJson = Annotated[bool, typer.Option("--json", help="Print figures as JSON and nothing else.")]
Model = Annotated[str, typer.Option(help="Hugging Face name, local path, or 'sprout', the embedded model.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(table: Table) -> None:
    """To a terminal as wide as that is, elsewhere as wide as any table needs."""
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _failed(comparisons: list[Comparison]) -> int:
    """Say on standard error which engines failed; the exit status."""
    from graftlm.ab.report import failures

    lines = failures(comparisons)
    for line in lines:
        typer.echo(line, err=True)
    return int(bool(lines))


@app.command()
def demo(
    model: Model = "sprout",
    frameworks: Annotated[str, typer.Option(help="Which, comma-separated.")] = "dspy,langchain,llama_index,guidance",
    as_json: AsJson = False,
) -> None:
    """Stock pipelines of four frameworks, on plain transformers and on GraftLM, same weights."""
    from graftlm.ab import report
    from graftlm.demo import show

    comparisons = show.run(model, [name.strip() for name in frameworks.split(",")], progress=Progress(as_json))
    if as_json:
        print_json(report.to_json(comparisons))
    else:
        print_table(report.table(comparisons, f"The same pipelines and weights ({model}), before and after"))
        typer.echo("\n".join(show.notes(comparisons)))
    raise typer.Exit(_failed(comparisons))


@app.command()
def ab(
    pipeline: Annotated[Path, typer.Argument(help="A Python file that defines run(llm, inputs) and its engines.")],
    engines: Annotated[str, typer.Option(help="Comma-separated; the first is the baseline.")] = "hf,graftlm",
    model: Model = "sprout",
    report_to: Annotated[
        Path | None, typer.Option("--report", help="Folder for report.json, report.md, chart.png.")
    ] = None,
    with_chart: Annotated[bool, typer.Option("--chart/--no-chart", help="Whether the report has a chart.")] = True,
    as_json: AsJson = False,
) -> None:
    """Compare engines on a pipeline of your own: answers, time, tokens."""
    from graftlm.ab import report
    from graftlm.ab.compare import compare
    from graftlm.ab.pipeline import Pipeline

    names = [name.strip() for name in engines.split(",") if name.strip()]
    comparison = compare(Pipeline.load(pipeline), names, model, Progress(as_json))
    if as_json:
        print_json(report.to_json([comparison]))
    else:
        print_table(report.table([comparison], comparison.pipeline.title))
    if report_to is not None:
        for path in report.write([comparison], report_to, with_chart):
            typer.echo(f"wrote {path}", err=True)
    raise typer.Exit(_failed([comparison]))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Run the benchmarks of a source checkout: graftlm bench runtime --quick."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench/__main__.py").is_file():
        raise ConfigError(
            "the benchmarks come with the source, not with the wheel; clone the repository and run make bench"
        )
    raise typer.Exit(subprocess.call([sys.executable, "-m", "bench", *context.args], cwd=root))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    model: Model = "sprout",
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user message through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For temperatures above 0.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer in text that this matches.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text, printed as it comes."""
    from graftlm import Runtime

    text = sys.stdin.read() if prompt == "-" else prompt
    given: Any = [{"role": "user", "content": text}] if chat else text
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or (), "regex": regex}
    with Runtime(model) as runtime:
        if as_json:
            done = runtime.generate(given, **sampling)
            usage = {
                name: getattr(done.usage, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
            }
            print_json({"text": done.text, "finish_reason": done.finish_reason, "usage": usage})
        else:
            for chunk in runtime.stream(given, **sampling):
                typer.echo(chunk.text, nl=False)
            typer.echo()


@app.command()
def plugins(as_json: AsJson = False) -> None:
    """What is installed, what each plugin offers, which one is broken and why."""
    from graftlm.plugins import manager

    loaded = manager.load().plugins
    if as_json:
        print_json(
            [
                {
                    "plugin": plugin.name,
                    "source": plugin.source,
                    "error": plugin.error,
                    "offers": [{"kind": o.kind, "name": o.name, "description": o.description} for o in plugin.offers],
                }
                for plugin in loaded
            ]
        )
        return
    table = Table("plugin", "kind", "name", "what", title="GraftLM plugins")
    for plugin in loaded:
        for i, offer in enumerate(plugin.offers):
            table.add_row("" if i else plugin.name, offer.kind, offer.name, offer.description)
        if plugin.error is not None:
            table.add_row(plugin.name, "", "", f"left out: {plugin.error}", style="red")
        table.add_section()
    print_table(table)


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, devices and the embedded model, as found on this machine."""
    from graftlm.machine import describe

    found = describe()
    if as_json:
        print_json(found)
        return
    table = Table(show_header=False, title="GraftLM")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), "not installed" if value is None else str(value))
    print_table(table)


def main() -> None:
    """Entry point: an error of GraftLM is one line on standard error and exit status 1."""
    try:
        app()
    except GraftError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] ", error, sep="", markup=True, highlight=False)
        raise SystemExit(1) from None
