"""The command `graftlm`: demo, ab, serve, bench, generate, warm, grammar, plugins, info."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graftlm.core.errors import ConfigError, GraftError
from graftlm.kernels.jit import python_process
from graftlm.progress import Progress, Waiting
from graftlm.text_files import read_text

app = typer.Typer(
    name="graftlm",
    help="A fast language-model runtime under the frameworks you already write in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

if TYPE_CHECKING:
    from graftlm.ab import Comparison
    from graftlm.ab.against import Change
    from graftlm.core.config import SamplingOptions


def _print_version(wanted: bool) -> None:
    if wanted:
        import graftlm

        typer.echo(f"graftlm {graftlm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A fast language-model runtime under the frameworks you already write in."""
    if context.invoked_subcommand != "serve":  # which has a form of its own
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")


AsJson = Annotated[bool, typer.Option("--json", help="Print figures as JSON and nothing else.")]
Model = Annotated[str, typer.Option(help="Hugging Face name, local path, or 'sprout', the embedded model.")]


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    typer.echo(text.encode("utf-8", "backslashreplace").decode())  # lone surrogates are escaped as in JSON


def print_table(table: Table) -> None:
    """Print in the width of the terminal; in 120 columns, which every table fits, if there is none."""
    Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table)


def _failed(comparisons: list[Comparison]) -> int:
    """Print the failed engines on standard error; return the exit status."""
    from graftlm.ab.report import failures

    lines = failures(comparisons)
    for line in lines:
        typer.echo(line, err=True)
    return int(bool(lines))


CHART_HELP = "Whether to write chart.png; if not given, where matplotlib is installed."
SUGGEST_HELP = "Compare nothing: show where prompts stop sharing, and the line to change."


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
        report.print_table(comparisons, f"The same pipelines and weights ({model}), before and after")
        typer.echo("\n".join(show.notes(comparisons)))
    raise typer.Exit(_failed(comparisons))


@app.command()
def ab(
    pipeline: Annotated[Path, typer.Argument(help="A Python file that defines run(llm, inputs).")],
    engines: Annotated[str, typer.Option(help="Comma-separated; the first is the baseline.")] = "hf,graftlm",
    model: Model = "sprout",
    rounds: Annotated[int, typer.Option(help="Measured rounds of each engine, in turns; at least so many.")] = 3,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Begin no further round after so many minutes; if not given 5, and 1 for rounds beyond --rounds."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of each engine; one per idle core if not given.")
    ] = None,
    report_to: Annotated[
        Path | None, typer.Option("--report", help="Folder for report.html, report.json, report.csv, chart.png.")
    ] = None,
    with_chart: Annotated[bool | None, typer.Option("--chart/--no-chart", help=CHART_HELP)] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds files already.")] = False,
    with_check: Annotated[
        bool, typer.Option("--check", help="Plant faults into the first engine and show that each is found.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Folder of an earlier --report: print what has changed since.")
    ] = None,
    prices: Annotated[
        str | None, typer.Option(help="Price of a million prompt and completion tokens of an endpoint, e.g. 0.15,0.6.")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="Which of the file's run_<framework> to take, where it has several.")
    ] = None,
    swap: Annotated[
        str | None,
        typer.Option(help="The file is a script: let its calls of this constructor give the engine, e.g. ChatOpenAI."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Load the model in this dtype with every engine, as float32; its own if not given."),
    ] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Load one engine at a time, where two do not fit into memory.")
    ] = False,
    pythons: Annotated[
        list[str] | None,
        typer.Option(
            "--python", help="ENGINE=PATH: the Python of an engine whose packages live in another environment."
        ),
    ] = None,
    suggests: Annotated[bool, typer.Option("--suggest", help=SUGGEST_HELP)] = False,
    as_json: AsJson = False,
) -> None:
    """Compare engines on a pipeline of your own: answers, time, tokens."""
    from graftlm.ab import compare, report
    from graftlm.ab.against import changes, read_report
    from graftlm.ab.cost import read_prices
    from graftlm.ab.engines.other_python import read_pythons

    if suggests:
        return _print_suggestion(pipeline, model, framework, as_json)
    names = [name.strip() for name in engines.split(",") if name.strip()]
    if report_to is not None:
        report.check_folder(report_to, force=force, with_chart=bool(with_chart))
    before, known_prices = read_report(against) if against is not None else None, read_prices(prices)
    options: dict[str, Any] = {"rounds": rounds, "minutes": minutes, "threads": threads, "progress": Progress(as_json)}
    options |= {"framework": framework, "swap": swap, "dtype": dtype, "pythons": read_pythons(pythons or ())}
    if with_check:
        _check_faults(pipeline, names[:1], model, options, as_json)
        return
    comparison = compare(pipeline, names, model, one_at_a_time=one_at_a_time, **options)
    comparison.prices = known_prices
    changed = changes(before, report.to_json([comparison])) if before is not None else []
    if as_json:
        print_json(report.to_json([comparison]))
    else:
        report.print_table([comparison])
        if changed:
            report.print_changes(changed)
    if report_to is not None:
        _write_report(comparison, report_to, with_chart, changed)
    raise typer.Exit(130 if comparison.interrupted else _failed([comparison]))


def _print_suggestion(pipeline: Path, model: str, framework: str | None, as_json: bool) -> None:
    from graftlm.ab.pipeline import suggest_for

    found = suggest_for(pipeline, model, framework)
    print_json(asdict(found)) if as_json else print(found)


def _write_report(comparison: Comparison, folder: Path, with_chart: bool | None, changed: list[Change]) -> None:
    """Write the report's files and print their paths; None draws the chart if matplotlib is installed."""
    from graftlm.ab import report

    command = shlex.join(["graftlm", *sys.argv[1:]])
    drawn = report.can_draw() if with_chart is None else with_chart
    for path in report.write([comparison], folder, command, drawn, changed):
        typer.echo(f"wrote {path}", err=True)
    if with_chart is None and not drawn:
        typer.echo("chart.png was left out, which needs matplotlib: pip install matplotlib", err=True)


def _check_faults(pipeline: Path, names: list[str], model: str, options: dict[str, Any], as_json: bool) -> None:
    """Run `graftlm ab --check`; exit with status 1 if a planted fault is not found."""
    from graftlm.ab.compare import check

    if not names:
        raise ConfigError("--engines is empty; name the engine to check")
    findings = check(pipeline, names[0], model, **options)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("planted fault", "found", "the comparison says", title=f"{names[0]} against itself")
        for finding in findings:
            table.add_row(finding.plant, "yes" if finding.found else "NO", finding.evidence)
        print_table(table)
    raise typer.Exit(int(not all(finding.found for finding in findings)))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Hugging Face name, local folder, GGUF file, or 'sprout'.")] = "sprout",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that requests must bring; may be given again. Or GRAFTLM_API_KEY, which is one key."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Another name of a keyless local server; may be given again.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given again.")
    ] = None,
    model_alias: Annotated[
        list[str] | None, typer.Option(help="Another name of the model, beside its own; may be given again.")
    ] = None,
    embedding_model: Annotated[
        str | None, typer.Option(help="FOLDER or NAME=FOLDER of sentence-transformers or a cross-encoder.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Pages of this origin may use the server, as https://app.example; '*' for all."),
    ] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="The certificate (PEM) to serve HTTPS with.")] = None,
    ssl_keyfile: Annotated[
        str | None, typer.Option(help="The certificate's key, unless it is in the same file.")
    ] = None,
    ignore_unknown: Annotated[
        bool, typer.Option("--ignore-unknown", help="Leave out unknown fields of requests, and list them in a header.")
    ] = False,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Requests may bring a chat template.")
    ] = False,
    max_open_requests: Annotated[int, typer.Option(help="One more gets status 429.")] = 1024,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds after which a request ends.")] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish requests after SIGTERM.")] = 30.0,
    allow_media_url: Annotated[
        list[str] | None, typer.Option(help="A host whose https pictures are fetched; may be given again.")
    ] = None,
    allowed_media_path: Annotated[
        list[str] | None, typer.Option(help="A folder whose pictures requests may name; may be given again.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Runtimes with a copy of the model each, on Ray.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that hold a part of each layer.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of the runtime, as dtype=bfloat16; may be given again.")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of docs/security.md, as header_s=20; may be given again.")
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    try:
        from graftlm.adapters.server import ServerSettings, process
    except ImportError as error:
        raise ConfigError(f"graftlm serve needs {error.name}; run: pip install 'graftlm[serve]'") from error

    settings = ServerSettings(
        host=host,
        port=port,
        # typer would split the variable at spaces, and each word would be a key
        api_keys=tuple(api_key or filter(None, [os.environ.get("GRAFTLM_API_KEY")])),
        allowed_hosts=tuple(allowed_host or ()),
        model_names=tuple(served_model_name or ()),
        model_aliases=tuple(model_alias or ()),
        allowed_origins=tuple(allowed_origin or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ignore_unknown=ignore_unknown,
        trust_request_chat_template=trust_request_chat_template,
        max_open_requests=max_open_requests,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        media_hosts=tuple(allow_media_url or ()),
        media_folders=tuple(allowed_media_path or ()),
        limits=process.read_limits(limit or ()),
    )
    options = process.read_options(option or ())
    if replicas > 1:
        options = {"engine": "ray", **options, "replicas": replicas}
    if tensor_parallel > 1:
        options = {**options, "tensor_parallel": tensor_parallel}
    process.serve(model, settings, options, embedding_model=embedding_model)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Run the benchmarks of a source checkout: graftlm bench runtime --quick."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench/__main__.py").is_file():
        raise ConfigError(
            "the benchmarks come with the source, not with the wheel; clone the repository and run make bench"
        )
    with python_process.start(("-m", "bench", *context.args), cwd=root) as process:
        raise typer.Exit(process.wait())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    model: Model = "sprout",
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user message through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0, the default, is greedy; above 0 the text is sampled.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For temperatures above 0.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer in text that this matches.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text and print each token at once. Greedy unless --temperature is above 0."""
    from graftlm import Runtime

    text = sys.stdin.read() if prompt == "-" else prompt
    given: Any = [{"role": "user", "content": text}] if chat else text
    sampling: SamplingOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": stop or (),
        "regex": regex,
    }
    waits = Waiting(f"loading {model}, reading the prompt")
    runtime = Runtime(model, quiet=waits.is_shown)  # not closed after an error, which would wait for the weights
    if as_json:
        with waits:
            done = runtime.generate(given, **sampling)
        usage = {name: getattr(done.usage, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
        print_json({"text": done.text, "finish_reason": done.finish_reason, "usage": usage})
    else:
        chunks = runtime.stream(given, **sampling)
        with waits:
            first = next(chunks, None)
        for chunk in chain([first] if first else [], chunks):
            typer.echo(chunk.text, nl=False)
        typer.echo()
    runtime.close()


@app.command()
def warm(
    model: Annotated[str, typer.Argument(help="Hugging Face name, local folder, GGUF file, or 'sprout'.")] = "sprout",
    as_json: AsJson = False,
) -> None:
    """Compute the caches of a first process, such as compiled CPU loops, and keep them on disk: for images and CI."""
    from graftlm.core.model.warm import warm_model

    started = time.perf_counter()
    folder = warm_model(model, quiet=as_json)
    seconds = time.perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if as_json:
        print_json({"model": model, "seconds": seconds, "folder": str(folder), "bytes": num_bytes})
    else:
        typer.echo(f"{model} is prepared: {seconds:.1f} s; {folder} holds {num_bytes / 2**20:.1f} MiB")


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Hugging Face name or local folder of an unquantised model.")],
    out: Annotated[Path | None, typer.Argument(help="The new folder; by default NAME-SCHEME here.")] = None,
    to: Annotated[str, typer.Option(help="fp8, int8 or int4.")] = "int4",
    check: Annotated[bool, typer.Option("--check", help="Print what is lost: KL divergence on English text.")] = False,
    device: Annotated[str, typer.Option(help="Where weights are rounded and compared.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a model with rounded weights, in the format compressed-tensors, which other engines read too."""
    from graftlm.core.model.description import resolve
    from graftlm.core.model.quantised.rounded_model import scheme_of, write_rounded
    from graftlm.core.model.weights import choose_device

    scheme = scheme_of(to)
    folder = out or Path(f"{Path(model).name}-{scheme}")
    found = write_rounded(resolve(model), folder, scheme, check=check, device=choose_device(device))
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if as_json:
        print_json({"folder": str(folder), "bytes": num_bytes, **(found._asdict() if found else {})})
        return
    typer.echo(f"{folder} holds {num_bytes / 2**20:.1f} MiB of weights in {scheme}")
    if found is not None:
        typer.echo(f"KL divergence {found.kl:.4f} nats a token; {found.same_top:.1%} of tokens have the same top token")


grammars = typer.Typer(help="Constraints: what becomes of a schema.", no_args_is_help=True)
app.add_typer(grammars, name="grammar")


@grammars.command()
def explain(
    file: Annotated[Path, typer.Argument(help="A JSON schema.", exists=True, dir_okay=False)],
    strict: Annotated[bool, typer.Option(help="Close objects that do not say otherwise.")] = True,
    as_json: AsJson = False,
) -> None:
    """Print the engine of each part of a schema, its share of forced text, and errors with their remedies."""
    from graftlm.core.grammar.explain import explain as explain_spec
    from graftlm.core.grammar.spec import JsonSchema, Options

    found = explain_spec(JsonSchema(read_text(file)), Options(strict=strict))
    if as_json:
        print_json(asdict(found))
    else:
        typer.echo(str(found))
    raise typer.Exit(int(found.engine is None))


@app.command()
def plugins(as_json: AsJson = False) -> None:
    """List the installed plugins with their offers, and the error of each broken one."""
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
def info(
    model: Annotated[str | None, typer.Option(help="Say how this model would run here, without its weights.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print this machine's versions, devices and embedded model; with --model, the execution of that model here."""
    if model is not None:
        from graftlm.trial import execution_of

        found: dict[str, Any] = {"model": model, "execution": execution_of(model)}
    else:
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
    """Entry point: an error of GraftLM or a missing package is one line on standard error and exit status 1."""
    try:
        app()
    except GraftError as error:
        _fail(type(error).__name__, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "graftlm"):
            raise
        _fail("ModuleNotFoundError", f"the package {package!r} is not installed; run: pip install {package}")


def _fail(kind: str, message: str) -> NoReturn:
    told = Text.assemble((f"{kind}:", "red"), " ", message)  # text in brackets is no markup
    Console(stderr=True, soft_wrap=True).print(told, highlight=False)
    raise SystemExit(1) from None
