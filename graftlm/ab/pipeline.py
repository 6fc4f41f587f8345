"""Pipeline: a user's Python file on which engines are compared."""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from graftlm.ab.engines.frameworks import FRAMEWORKS, MAX_TOKENS, framework_of, named_engines
from graftlm.ab.measure.failures import CaughtErrors
from graftlm.ab.script import Script
from graftlm.core.errors import ConfigError
from graftlm.text_files import read_text

if TYPE_CHECKING:
    from graftlm.core.program.compiler.sharing import Suggestion

DATA = ("inputs", "warm_up", "right")
NOT_ENGINES = {"run", *DATA}
NO_RUN = (
    "pipeline {!r} defines no run(llm, inputs); define one that returns an answer per input, or compare a script as it "
    "is with --swap and the constructor of its model, as --swap ChatOpenAI"
)


@dataclass(frozen=True)
class Engine:
    """One engine of a pipeline. `open(model)` is the constructor line: it returns the argument `llm` of `run`."""

    label: str
    open: Callable[[str], Any]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, loaded from a file that defines

    run(llm, inputs) -> list      the pipeline: a list with one answer per input, in order; may be `async`
    run_dspy(llm, inputs), ...    instead of `run`: the same pipeline in several frameworks; one is selected
    inputs() -> list              the inputs, or a list of this name; without it there is one, None
    warm_up() -> list             inputs to run before the measurement; without it, the first input is held out
    right(input, answer) -> bool  judges an answer; optional
    framework = "dspy"            required if the file's imports do not show it; each framework has engines by name
    max_tokens = 256              limit of generated tokens per call, for engines by name
    name(model), ...              one function per engine without a known name, or with another constructor;
                                  `name:argument` on the command line calls name(model, argument)
    """

    name: str
    title: str
    run: Run
    inputs: Sequence[Any]
    held_out: Sequence[Any]
    right: Callable[[Any, Any], bool] | None
    constructors: Mapping[str, Callable[..., Any]]
    framework: str | None = None
    notes: Sequence[str] = ()
    caught: CaughtErrors = field(default_factory=CaughtErrors)

    @classmethod
    def load(cls, path: Path, framework: str | None = None) -> Pipeline:
        """Import the file and read its definitions. Raises: ConfigError if it is no pipeline.

        framework  selects one of the file's `run_<framework>`
        """
        if path.is_file() and not _may_define_run(read_text(path)):
            raise ConfigError(NO_RUN.format(str(path)))  # a script: importing it would run it
        caught = CaughtErrors()
        names = vars(_import(path, caught))
        functions: dict[str, Callable[..., Any]] = {
            name: value
            for name, value in names.items()
            if inspect.isfunction(value) and value.__module__ == names["__name__"] and not name.startswith("_")
        }
        functions |= {
            name: _function(path, name, names[name]) for name in DATA if name in names.keys() - functions.keys()
        }
        run, framework = _program(path, functions, framework or names.get("framework"))
        framework = framework or framework_of(read_text(path))
        constructors = dict(named_engines(framework, int(names.get("max_tokens", MAX_TOKENS))))
        constructors |= {n: f for n, f in functions.items() if n not in NOT_ENGINES and not n.startswith("run_")}
        if not constructors:
            raise ConfigError(
                f"pipeline {str(path)!r} defines no engine function such as graftlm(model), and imports no framework "
                "whose engines are known by name; define one, or say framework = 'langchain', 'dspy', 'llama_index' or "
                "'guidance'"
            )
        inputs, held_out = _inputs(path, functions)
        title = (names.get("__doc__") or path.stem).strip().partition("\n")[0]
        right = functions.get("right")
        return cls(path.stem, title, run, inputs, held_out, right, constructors, framework, (), caught)

    @classmethod
    def of_script(cls, path: Path, constructor: str) -> Pipeline:
        """Load a script with its calls of `constructor` replaced; it has one input, its printed text is the answer."""
        script = Script.load(path, constructor)
        notes = [f"Arguments of {constructor} that no engine was given: {', '.join(script.unused)}."]
        engines = named_engines(script.framework, script.max_tokens or MAX_TOKENS)
        title = (ast.get_docstring(ast.parse(read_text(path))) or path.stem).partition("\n")[0]
        return cls(
            path.stem, title, lambda llm, inputs: [script.run(llm)], [None], [], None, engines, script.framework,
            notes if script.unused else (), script.caught,
        )  # fmt: skip

    def engine(self, spec: str) -> Engine:
        """Return the engine `name` or `name:argument`. Raises: ConfigError, listing the known ones."""
        name, colon, argument = spec.partition(":")
        if name not in self.constructors:
            known = ", ".join(self.constructors) or "none"
            hint = "" if self.framework else (
                "; define a function of that name, or say framework = 'langchain', 'dspy', 'llama_index' or 'guidance'"
            )  # fmt: skip
            raise ConfigError(f"pipeline {self.name!r} has no engine {name!r}; known: {known}{hint}")
        constructor = self.constructors[name]
        arguments = (argument,) if colon else ()
        try:
            inspect.signature(constructor).bind("model", *arguments)
        except TypeError as error:
            usual = "URL" if name == "openai" else "ARGUMENT"
            raise ConfigError(
                f"engine {spec!r} of pipeline {self.name!r}: {error}; an argument follows a colon, {name}:{usual}"
            ) from error
        return Engine(spec, lambda model: constructor(model, *arguments))

    def answer(self, llm: Any, inputs: Sequence[Any]) -> list[Any]:
        """Call `run` with copies of the inputs, which it may change.

        Raises: ConfigError unless it returns a list or tuple with one complete answer per input.
        """
        answers: Any = self.run(llm, _copied(inputs))
        if inspect.isawaitable(answers):
            answers = _loop().run_until_complete(answers)
        if not isinstance(answers, list | tuple):
            raise ConfigError(
                f"run() of pipeline {self.name!r} returned a {type(answers).__name__}; "
                f"return a list with one answer per input"
            )
        if len(answers) != len(inputs):
            raise ConfigError(
                f"run() of pipeline {self.name!r} gave {len(answers)} answers to {len(inputs)} inputs; "
                "return one answer per input, in order"
            )
        for i, answer in enumerate(answers):
            if isinstance(answer, Iterator | AsyncIterator | Awaitable):
                raise ConfigError(
                    f"answer {i} of run() of pipeline {self.name!r} is a {type(answer).__name__}, whose calls are "
                    "still to come; return what it gives, as ''.join(stream) or await it"
                )
        return list(answers)


def suggest_for(path: Path, model: str, framework: str | None = None) -> Suggestion:
    """Run a pipeline once on GraftLM and return what another order of its prompts' blocks would bring.

    Raises: ConfigError if the pipeline makes fewer than two calls of text.
    """
    from graftlm.core.program.compiler.recording import explain, recorded
    from graftlm.core.runtime import Runtime

    pipeline = Pipeline.load(path, framework)
    llm = pipeline.engine("graftlm").open(model)
    with recorded(Runtime) as requests:
        pipeline.answer(llm, [*pipeline.inputs])
    asked = [(runtime, request) for runtime, request in requests if request.score_ids is None]
    if len(asked) < 2:
        raise ConfigError(f"pipeline {str(path)!r} made {len(asked)} model calls; give it at least two inputs")
    runtime = asked[0][0]
    return explain(runtime, [request for _, request in asked], [path, *_beside(path)])


def _beside(path: Path) -> list[Path]:
    """Return the other Python files of the pipeline's folder, which it may import."""
    return sorted(other for other in path.resolve().parent.glob("*.py") if other.resolve() != path.resolve())


Run = Callable[[Any, Sequence[Any]], list[Any]]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of asynchronous pipelines, one for all rounds: clients keep connections in it."""
    return asyncio.new_event_loop()


def _copied(value: Any) -> Any:
    """Copy lists, dicts, sets and tuples, but not the objects in them: a chat history begins each round unchanged."""
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def _may_define_run(source: str) -> bool:
    """Return True if the file may define `run` or a `run_<framework>`, or has a syntax error."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return True
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names += [alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    names += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return any(name in ("run", "*") or name.startswith("run_") for name in names)


def _program(path: Path, functions: Mapping[str, Any], framework: str | None) -> tuple[Run, str | None]:
    """Return `run`, or the selected `run_<framework>`, and its framework."""
    several = {name.removeprefix("run_"): f for name, f in functions.items() if name.removeprefix("run_") in FRAMEWORKS}
    if several and (framework is not None or "run" not in functions):
        if framework not in several:
            given = "no framework was named" if framework is None else f"{framework!r} is not among them"
            raise ConfigError(
                f"pipeline {str(path)!r} is written in {', '.join(several)}, and {given}; choose one with --framework"
            )
        return several[framework], framework
    if "run" not in functions:
        raise ConfigError(NO_RUN.format(str(path)))
    return functions["run"], framework


def _function(path: Path, name: str, value: Any) -> Callable[..., Any]:
    """Return the value of a name of DATA as a function: an imported function, or one that returns a list."""
    if callable(value):
        return cast(Callable[..., Any], value)
    if name == "right" or not isinstance(value, (list, tuple)):
        raise ConfigError(
            f"{name} of pipeline {str(path)!r} is of type {type(value).__name__}; define a function {name}()"
        )
    return lambda: list(value)


def _inputs(path: Path, functions: Mapping[str, Callable[..., Any]]) -> tuple[list[Any], list[Any]]:
    """Return the inputs to measure and the inputs of the warm-up."""
    inputs = list(functions["inputs"]()) if "inputs" in functions else [None]
    if not inputs:
        raise ConfigError(f"inputs() of pipeline {str(path)!r} is empty; it must give at least one input")
    if "warm_up" in functions:
        return inputs, list(functions["warm_up"]())
    return (inputs[1:], inputs[:1]) if len(inputs) > 1 else (inputs, [])


def _import(path: Path, caught: CaughtErrors) -> ModuleType:
    """Import a file by its path, under a unique name: a file `dspy.py` must not replace the package.

    Modules in its folder are found after all installed ones, for the same reason.
    """
    folder = path.resolve().parent
    name = f"graftlm_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"pipeline {str(path)!r} cannot be read; give the path of a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _import_namespaces(folder)
    sys.path.append(str(folder))
    tree = ast.parse(path.read_bytes(), str(path))
    vars(module).update(caught.watch(tree))
    exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
    return module


def _import_namespaces(folder: Path) -> None:
    """Import installed namespace packages, such as `llama_index`, that a module in `folder` would hide.

    Python prefers a module to a package without an `__init__.py`, in any order of `sys.path`.
    """
    for beside in sorted({path.stem for path in folder.glob("*.py")}):
        spec = importlib.util.find_spec(beside) if beside.isidentifier() and beside not in sys.modules else None
        if spec is not None and spec.origin is None and spec.submodule_search_locations is not None:
            importlib.import_module(beside)
