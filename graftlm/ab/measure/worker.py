"""Worker: the process of one engine. It reads pickled commands from standard input and writes one reply for each.

Standard output carries the replies only; the pipeline's own output goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from graftlm.ab.engines.frameworks import PLAIN, import_packages, remedy
from graftlm.ab.engines.servers import Server
from graftlm.ab.measure.answers import as_json, as_text
from graftlm.ab.measure.failures import LoggedErrors, told
from graftlm.ab.measure.meter import Meter
from graftlm.ab.measure.profile import Call, Plant, Profile, Round
from graftlm.ab.pipeline import Pipeline
from graftlm.core.errors import ConfigError
from graftlm.machine import busy_core_seconds, version_of

ENGINE_MODULES = {
    "torch": "torch", "transformers": "transformers", "langchain-core": "langchain_core", "dspy": "dspy",
    "llama-index-core": "llama_index.core", "guidance": "guidance", "openai": "openai",
}  # fmt: skip
"""Packages whose versions a report shows, with the module that an engine's process has loaded then."""
MAX_SHOWN = 80
"""Characters of an answer that are shown in an error."""


class Worker:
    """A runner of one pipeline on one engine, round by round."""

    def __init__(self, path: Path, engine: str, model: str, plant: Plant | None = None,
                 framework: str | None = None, swap: str | None = None, dtype: str | None = None) -> None:  # fmt: skip
        self._meter = Meter()
        self.errors = LoggedErrors()
        self._pipeline = Pipeline.load(path, framework) if swap is None else Pipeline.of_script(path, swap)
        self._engine = self._pipeline.engine(engine)
        self._model, self._plant, self._dtype = model, plant, dtype
        self._llm: Any = None
        self._inputs = dict(enumerate(self._pipeline.inputs))  # the inputs by number, without those that were left out
        self._remembered: list[Any] = []
        self._num_tried = 0
        self._is_counting = False
        disable_framework_caches()

    def describe(self) -> dict[str, Any]:
        """Return name, title and inputs of the pipeline."""
        pipeline = self._pipeline
        return {
            "name": pipeline.name,
            "title": pipeline.title,
            "inputs": [as_text(one) for one in pipeline.inputs],
            "held_out": len(pipeline.held_out),
            "notes": list(pipeline.notes),
        }

    @property
    def engine(self) -> tuple[str | None, str]:
        """The framework, and the engine's name."""
        return self._pipeline.framework, self._engine.label

    def open(self) -> list[str]:
        """Build the engine, and run the warm-up inputs so that weights and packages are loaded.

        A pipeline with a single input warms up on that one.
        Returns: notes on this engine for the reader of a report.
        """
        is_endpoint = "://" in self._engine.label  # the model's name is the user's, not a folder
        named = self._model if is_endpoint else local_name(self._model)
        if self._dtype is not None and not is_endpoint:
            named = with_dtype(named, self._dtype, Path(os.environ["DSPY_CACHEDIR"]) / "model")
        self._llm = self._engine.open(named)
        self._meter.attach()
        self._pipeline.answer(self._llm, self._pipeline.held_out or self._pipeline.inputs)
        self._meter.attach()
        if self._plant == "cached call":
            self._remembered = self._pipeline.answer(self._llm, self._pipeline.inputs[-1:])
        notes = [
            f"The prefix cache of {name} cannot be emptied: it may know prompts from earlier rounds."
            for name in self._meter.start()
        ]
        if self._pipeline.framework != "native" and any(r.config.engine == PLAIN for r in self._meter.runtimes):
            notes.append(
                f"{self._engine.label}: {self._pipeline.framework}'s own class reads text only, so transformers' "
                "generate ran behind GraftLM's class."
            )
        unseen = [server.name for server in Server.open if server.pid is None]
        return notes + [
            f"The CPU time of {name} is that of its client alone: its process was not found." for name in unseen
        ]

    def facts(self) -> dict[str, str | None]:
        """Return dtype and device of the engine's weights, and the versions of its packages; None where unknown."""
        weights = next((runtime.stats().weights for runtime in self._meter.runtimes), None)
        model = next(iter(self._meter.models), None)
        if model is not None:
            weights = str(model.dtype).removeprefix("torch.")
        device = getattr(model, "device", None) or next(map(_device, self._meter.runtimes), None)
        used = [name for name, module in ENGINE_MODULES.items() if module in sys.modules]
        versions = {name: version_of(name) for name in ["graftlm"] * bool(self._meter.runtimes) + used}
        versions["Python"] = platform.python_version()
        return {
            "dtype": weights or None,
            "device": None if device is None else str(device),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        }

    def leave_out(self, inputs: Sequence[int]) -> None:
        """Skip these inputs from now on."""
        for i in inputs:
            self._inputs.pop(i, None)

    def probe(self, seconds: float) -> tuple[dict[int, str], list[int]]:
        """Run every input alone, unmeasured; begin none after `seconds`.

        Returns: the errors by input, and the inputs that were not run.
        """
        failed: dict[int, str] = {}
        self._num_tried, ends = 0, time.monotonic() + seconds
        for i, one in self._inputs.items():
            if self._num_tried and time.monotonic() > ends:
                return failed, list(self._inputs)[self._num_tried :]
            self._num_tried += 1
            self.errors.clear()
            try:
                self._pipeline.answer(self._llm, [one])
            except ConfigError:
                raise
            except Exception as error:
                failed[i] = self.told(error)
        return failed, []

    def round(self) -> Round:
        """Run all inputs once and measure. The prefix caches are empty at the start."""
        inputs = list(self._inputs.values())
        self._start()
        if isinstance(history := getattr(self._llm, "history", None), list):  # DSPy's history: a script may print it
            history.clear()
        self.errors.clear()
        self._pipeline.caught.clear()
        cpu_s, all_cpu_s, energy_j = cpu_seconds(), busy_core_seconds(), energy_joules()
        started = time.perf_counter()
        answers = self._pipeline.answer(self._llm, inputs[:-1] if self._remembered else inputs) + self._remembered
        wall_s = time.perf_counter() - started
        cpu_s = cpu_seconds() - cpu_s
        others = (busy_core_seconds() - all_cpu_s - cpu_s) / wall_s
        used_j = None if energy_j is None else (energy_joules() or 0.0) - energy_j
        unfinished = self._meter.under_way()
        if self._plant == "slow":
            time.sleep(wall_s)
            wall_s *= 2
        if self._plant == "changed answer":
            answers[0] = f"{as_text(answers[0])} (changed)"
        unread: set[str] = set()
        return Round(
            wall_s=wall_s,
            answers=[as_json(answer, unread) for answer in answers],
            unread=sorted(unread),
            right=self._judged(inputs, answers),
            work=self._meter.work(),
            spans=[(call.begin_s, call.end_s) for call in self._meter.calls(started)],
            cpu_s=cpu_s,
            other_cores=others,
            lost=lost_share(others, cpu_s / wall_s),
            errors=[*self._meter.failed(), *[self.errors.told()] * bool(self.errors.told())],
            num_failed=self._meter.num_failed,
            num_refused=self._meter.num_refused,
            caught=self._pipeline.caught.told(),
            prompts=self._meter.prompts,
            unfinished=unfinished,
            energy_j=used_j,
            **peak_memory(),
        )

    def _start(self) -> None:
        """Reset all counts, which takes a while: until then they are of the round before."""
        self._is_counting = False
        self._meter.start()
        self._is_counting = True

    def _judged(self, inputs: Sequence[Any], answers: Sequence[Any]) -> list[bool] | None:
        """Judge each answer; None for a pipeline without `right`. Raises: RuntimeError if its `right` raises."""
        right = self._pipeline.right
        if right is None:
            return None
        judged = []
        for one, answer in zip(inputs, answers, strict=True):
            try:
                judged.append(bool(right(one, answer)))
            except Exception as error:
                text = as_text(answer)[:MAX_SHOWN]
                raise RuntimeError(
                    f"right() raised {told(error)} on the answer {text!r}; let it take any answer"
                ) from None
        return judged

    def inspect(self) -> Profile:
        """Run all inputs once more and note every call. Token ids are not returned: they would fill the pipe."""
        self._start()
        with self._meter.watch():
            started = time.perf_counter()
            self._pipeline.answer(self._llm, list(self._inputs.values()))
            wall_s = time.perf_counter() - started
            self._meter.under_way()
        profile = self._meter.profile(started, wall_s)
        return replace(profile, calls=[replace(call, prompt_ids=[], token_ids=[]) for call in profile.calls])

    def trace(self, index: int) -> list[Call]:
        """Run one of the measured inputs alone and return its calls, with their tokens."""
        with self._meter.watch():
            self._pipeline.answer(self._llm, list(self._inputs.values())[index : index + 1])
            self._meter.under_way()
        return self._meter.calls()

    def logprobs(self, ids: list[int], tokens: list[int]) -> dict[str, Any]:
        """Return the log-probabilities of some tokens after `ids` and their spelling, where the engine gives them."""
        if self._meter.runtimes:
            runtime = self._meter.runtimes[0]
            found = [runtime.score(ids, [token]).logprobs[0] for token in tokens]
            return {"logprobs": found, "texts": [runtime.tokenizer.decode([t]) for t in tokens],
                    "before": runtime.tokenizer.decode(ids)}  # fmt: skip
        if not self._meter.models:
            return {"logprobs": [], "texts": [], "before": ""}
        import torch

        model = self._meter.models[0]
        with torch.inference_mode():
            given = torch.tensor([ids], device=model.device)
            row = torch.log_softmax(model(input_ids=given).logits[0, -1].float(), -1)
        return {"logprobs": [float(row[token]) for token in tokens], "texts": [], "before": ""}

    def told(self, error: BaseException) -> str:
        """Describe an error of the pipeline, with logged errors that it does not mention."""
        text, logged = told(error), self.errors.told()
        return text if not logged or logged.partition("the first ")[2] in text else f"{text}; {logged}"

    def calls(self) -> int:
        return self._meter.work().calls or 0 if self._is_counting else 0

    def num_tried(self) -> int:
        return self._num_tried


def _device(runtime: Any) -> Any:
    """Return the device of a runtime's weights; None for weights that are elsewhere."""
    runner = getattr(runtime._thread.engine, "runner", None)
    return getattr(getattr(runner, "loaded", None), "device", None)


def with_dtype(model: str, dtype: str, folder: Path) -> str:
    """Make a folder that describes a model in another dtype, which every engine then loads.

    Raises: ConfigError for a model that is no folder of config.json and weights.
    """
    source = Path(model)
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        raise ConfigError(f"--dtype {dtype} needs a model folder with config.json and safetensors; {model!r} is none")
    config = json.loads((source / "config.json").read_text())
    folder.mkdir()
    for path in filter(Path.is_file, source.iterdir()):
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        else:  # a chat template that is a link out of its folder is refused
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}))
    return str(folder)


def local_name(model: str) -> str:
    """Return the folder, GGUF file or Hugging Face id that a model name stands for.

    Raises: ModelError if it cannot be one.
    """
    if (Path(model).expanduser() / "config.json").is_file():
        return str(Path(model).expanduser())
    if model == "sprout":
        from graftlm.core.model.embedded import sprout_path

        return str(sprout_path())
    from graftlm.core.model.description import resolve
    from graftlm.core.model.gguf.folder import find_gguf

    file = find_gguf(model)
    return str(file) if file is not None else resolve(model)


def disable_framework_caches() -> None:
    """Switch off the response caches of the loaded frameworks for good, so that every call reaches the engine.

    A pipeline that sets such a cache in its `run` would be answered from memory from the second round on.
    """
    dspy = sys.modules.get("dspy")
    if dspy is not None:
        dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
        dspy.configure_cache = lambda *args, **options: None  # type: ignore[attr-defined]
    for name in ("chat_models", "llms"):
        module: Any = sys.modules.get(f"langchain_core.language_models.{name}")
        if module is not None:
            module.get_llm_cache = lambda: None


# -- use of the machine ----------------------------------------------------------------------------------------


def _server_processes() -> Iterator[Any]:
    """Yield the servers' processes and their children."""
    import psutil

    for server in Server.open:
        with contextlib.suppress(psutil.Error):
            if server.pid is not None:
                yield from (process := psutil.Process(server.pid), *process.children(recursive=True))


def cpu_seconds() -> float:
    """Return the CPU time of this process and its servers so far."""
    import psutil

    total = time.process_time()
    for process in _server_processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def lost_share(other_cores: float, own_cores: float) -> float:
    """Return the share of the time in which this process's compute threads had no core because others used it.

    Idle cores are cores that this engine did not need. Below 0 for cores that were left: values of short rounds are
    rough, and their mean is not.
    """
    import psutil

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    free = (psutil.cpu_count() or threads) - other_cores
    idle = free - own_cores
    return 1 - (free + idle) / threads


def energy_joules() -> float | None:
    """Return the GPUs' energy use since the driver was loaded, by NVIDIA's counter; None without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(torch.cuda.device_count())]
        return float(sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)) / 1000
    except Exception:  # no package, or a card without the counter
        return None


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process and its servers so far, in bytes."""
    import resource

    torch = sys.modules.get("torch")
    gpu = torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_available() else 0
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for process in _server_processes():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
    return {"peak_bytes": total, "peak_gpu_bytes": gpu}


# -- commands and replies --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reporting(count: Callable[[], int], say: Callable[[str, Any], None]) -> Iterator[None]:
    """Report a count five times a second, and at the end."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(0.2):
            say("calls", count())
        say("calls", count())

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def serve(commands: BinaryIO, replies: BinaryIO) -> None:
    """Answer commands, a name with arguments each, until there are no more. A reply is a kind with its value."""
    lock = threading.Lock()

    def say(kind: str, value: Any) -> None:
        with lock:
            replies.write(pickle.dumps((kind, value)))
            replies.flush()

    worker: Worker | None = None
    while True:
        try:
            name, arguments = pickle.load(commands)
        except EOFError:
            return
        try:
            if name == "load":
                worker = Worker(**arguments)
                value: Any = worker.describe()
            else:
                counts = {"round": worker.calls, "inspect": worker.calls, "probe": worker.num_tried} if worker else {}
                with _reporting(counts[name], say) if name in counts else contextlib.nullcontext():
                    value = getattr(worker, name)(**arguments)
            say("value", value)
            if name == "load" and worker is not None:
                import_packages(*worker.engine)
        except ConfigError as error:
            say("config_error", str(error))
        except BaseException as error:
            text = told(error) if worker is None else worker.told(error)
            say("error", ("; ".join([text, *(one.end for one in Server.open if one.end)]), remedy(error)))


def end_with(parent: int) -> None:
    """Kill this process and the servers that it has started once `parent` has ended, for any reason."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)  # a group of its own, see `EngineProcess`


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.path.append(os.getcwd())  # last, so that no file there replaces a module
    replies, commands = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a pipeline that reads its input finds none, and no commands
    serve(commands, replies)
    replies.flush()
    os._exit(0)  # without waiting for threads that a framework may have left behind


if __name__ == "__main__":
    main()
