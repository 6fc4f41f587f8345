"""A pipeline to compare engines on: a Python file of a user's own."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graftlm.core.errors import ConfigError

NOT_ENGINES = {"run", "inputs", "right"}


@dataclass(frozen=True)
class Engine:
    """One engine of a pipeline. `open(model)` is the constructor line: it returns what `run` takes as `llm`."""

    label: str
    open: Callable[[str], Any]


@dataclass(frozen=True)
class Pipeline:
    """A file that defines

    run(llm, inputs) -> list      the pipeline: one answer per input, in order
    hf(model), graftlm(model) ... one function per engine: the constructor line; `name:argument` on the command
                                  line calls name(model, argument)
    inputs() -> list              what to run on; one input, None, if it is missing
    right(input, answer) -> bool  whether an answer is right, where that can be told
    """

    name: str
    title: str
    run: Callable[[Any, Sequence[Any]], list[Any]]
    inputs: Sequence[Any]
    right: Callable[[Any, Any], bool] | None
    constructors: Mapping[str, Callable[..., Any]]

    @classmethod
    def load(cls, path: Path) -> Pipeline:
        """Import the file and take what it defines. ConfigError if it is no pipeline."""
        names = vars(_import(path))
        functions = {
            name: value
            for name, value in names.items()
            if inspect.isfunction(value) and value.__module__ == names["__name__"] and not name.startswith("_")
        }
        constructors = {name: value for name, value in functions.items() if name not in NOT_ENGINES}
        if "run" not in functions or not constructors:
            missing = "run(llm, inputs)" if "run" not in functions else "an engine function such as graftlm(model)"
            raise ConfigError(f"pipeline {str(path)!r} defines no {missing}")
        inputs = functions["inputs"]() if "inputs" in functions else [None]
        if not inputs:
            raise ConfigError(f"inputs() of pipeline {str(path)!r} is empty; it must give at least one input")
        title = (names.get("__doc__") or path.stem).strip().partition("\n")[0]
        return cls(path.stem, title, functions["run"], inputs, functions.get("right"), constructors)

    def engine(self, spec: str) -> Engine:
        """The engine called `name` or `name:argument`. ConfigError, listing the known ones, if there is none."""
        name, colon, argument = spec.partition(":")
        if name not in self.constructors:
            known = ", ".join(self.constructors)
            raise ConfigError(f"pipeline {self.name!r} has no engine {name!r}; it defines: {known}")
        constructor = self.constructors[name]
        arguments = (argument,) if colon else ()
        try:
            inspect.signature(constructor).bind("model", *arguments)
        except TypeError as error:
            raise ConfigError(f"engine {spec!r} of pipeline {self.name!r}: {error}") from error
        return Engine(spec, lambda model: constructor(model, *arguments))


def _import(path: Path) -> ModuleType:
    """Import a file by its path, under a name of its own: `dspy.py` must not stand in for the package."""
    name = f"graftlm_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"pipeline {str(path)!r} cannot be read; give the path of a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
