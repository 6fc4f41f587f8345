"""Worker: the process of one engine. It reads one JSON command per line and writes one JSON reply per line.

Standard output carries the replies alone; what the pipeline prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from graftlm.ab.answers import as_json, as_text
from graftlm.ab.classes.server import Server
from graftlm.ab.engines import remedy
from graftlm.ab.failures import LoggedErrors, told
from graftlm.ab.fingerprint import Fingerprint
from graftlm.ab.inspector import Inspector
from graftlm.ab.meter import Meter
from graftlm.ab.pipeline import Pipeline
from graftlm.core.errors import ConfigError
from graftlm.machine import busy_core_seconds

Plant = Literal["slow", "changed answer", "cached call"]
"""A fault that `graftlm ab --check` plants, to show that the comparison finds it."""
MAX_SHOWN = 80
"""Characters of an answer that are shown in an error."""


class Worker:
    """Runs one pipeline on one engine, round by round."""

    def __init__(
        self,
        path: Path,
        engine: str,
        model: str,
        plant: Plant | None = None,
        framework: str | None = None,
        swap: str | None = None,
    ) -> None:
        self._meter = Meter()
        self.errors = LoggedErrors()
        self._pipeline = Pipeline.load(path, framework) if swap is None else Pipeline.of_script(path, swap)
        self._engine = self._pipeline.engine(engine)
        self._model = model
        self._plant = plant
        self._llm: Any = None
        self._left_out: set[int] = set()
        self._remembered: list[Any] = []
        disable_framework_caches()

    def describe(self) -> dict[str, Any]:
        """Name, title and inputs of the pipeline."""
        pipeline = self._pipeline
        return {
            "name": pipeline.name,
            "title": pipeline.title,
            "inputs": [as_text(one) for one in pipeline.inputs],
            "held_out": len(pipeline.held_out),
            "notes": list(pipeline.notes),
        }

    def open(self) -> list[str]:
        """Build the engine, and run the warm-up inputs so that weights and packages are loaded.

        A pipeline with a single input warms up on that one.
        Returns: what a reader must know of this engine.
        """
        # An endpoint knows the model by the name that the user gave.
        is_endpoint = self._engine.label.startswith("openai:")
        self._llm = self._engine.open(self._model if is_endpoint else local_name(self._model))
        self._meter.attach()
        self._pipeline.answer(self._llm, self._pipeline.held_out or self._pipeline.inputs)
        self._meter.attach()
        if self._plant == "cached call":
            self._remembered = self._pipeline.answer(self._llm, self._pipeline.inputs[-1:])
        kept = [self._engine.label] * is_endpoint + self._meter.start()
        said = [
            f"The prefix cache of {name} cannot be emptied: it may know prompts from earlier rounds." for name in kept
        ]
        unseen = [server for server in Server.open if server.pid is None]
        return said + [
            f"The CPU time of {one.name} is that of its client alone: its process was not found." for one in unseen
        ]

    def leave_out(self, inputs: Sequence[int]) -> None:
        """Skip these inputs from now on."""
        self._left_out |= set(inputs)

    def probe(self) -> dict[str, str]:
        """Run every input alone; which inputs raise, and what. Not measured."""
        failed: dict[str, str] = {}
        for i, one in enumerate(self._pipeline.inputs):
            if i not in self._left_out:
                self.errors.clear()
                try:
                    self._pipeline.answer(self._llm, [one])
                except ConfigError:
                    raise
                except Exception as error:
                    failed[str(i)] = self.told(error)
        return failed

    def round(self) -> dict[str, Any]:
        """Run all inputs once and measure. The prefix caches of GraftLM's runtimes are empty at the start."""
        inputs = [one for i, one in enumerate(self._pipeline.inputs) if i not in self._left_out]
        asked = inputs[:-1] if self._remembered else inputs
        self._meter.start()
        if isinstance(history := getattr(self._llm, "history", None), list):  # of DSPy's LM: a script may print it
            history.clear()
        self.errors.clear()
        self._pipeline.caught.clear()
        cpu_s, all_cpu_s, energy_j = cpu_seconds(), busy_core_seconds(), energy_joules()
        started = time.perf_counter()
        answers = self._pipeline.answer(self._llm, asked) + self._remembered
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
        return {
            "wall_s": wall_s,
            "answers": [as_json(answer, unread) for answer in answers],
            "unread": sorted(unread),
            "right": self._judged(inputs, answers),
            "work": dataclasses.asdict(self._meter.work()),
            "spans": self._meter.spans(started),
            "cpu_s": cpu_s,
            "other_cores": others,
            "lost": lost_share(others, cpu_s / wall_s),
            "errors": [*self._meter.failed(), *[self.errors.told()] * bool(self.errors.told())],
            "num_failed": self._meter.num_failed,
            "num_refused": self._meter.num_refused,
            "caught": self._pipeline.caught.told(),
            "prompts": self._meter.prompts,
            "unfinished": unfinished,
            "energy_j": used_j,
            **peak_memory(),
        }

    def _judged(self, inputs: Sequence[Any], answers: Sequence[Any]) -> list[bool] | None:
        """Whether each answer is right; None where the pipeline cannot tell. RuntimeError if its `right` raises."""
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

    def inspect(self) -> dict[str, Any]:
        """Run all inputs once more and note every call; see `Profile`."""
        inspector = Inspector(self._meter.runtimes, self._meter.models)
        inputs = [one for i, one in enumerate(self._pipeline.inputs) if i not in self._left_out]
        self._meter.start()
        with inspector.watch():
            started = time.perf_counter()
            self._pipeline.answer(self._llm, inputs)
            wall_s = time.perf_counter() - started
            self._meter.under_way()
        profile = dataclasses.asdict(inspector.profile(wall_s, self._meter.spans(started)))
        profile["prompts"] = _fingerprint(profile["calls"])
        for call in profile["calls"]:
            call["prompt_ids"] = call["token_ids"] = ()
        return profile

    def trace(self, index: int) -> list[dict[str, Any]]:
        """Run one of the measured inputs alone and note its calls, with their tokens."""
        inputs = [one for i, one in enumerate(self._pipeline.inputs) if i not in self._left_out]
        inspector = Inspector(self._meter.runtimes, self._meter.models)
        with inspector.watch():
            self._pipeline.answer(self._llm, inputs[index : index + 1])
            self._meter.under_way()
        return [dataclasses.asdict(call) for call in inspector.calls()]

    def logprobs(self, ids: list[int], tokens: list[int]) -> dict[str, Any]:
        """The log-probabilities of some tokens after `ids`, where the engine gives them, and how they are spelled."""
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
        """An error of the pipeline, with what was logged before it and it does not say itself."""
        text, logged = told(error), self.errors.told()
        return text if not logged or logged.partition("the first ")[2] in text else f"{text}; {logged}"

    def calls(self) -> int:
        return self._meter.work().calls or 0


def _fingerprint(calls: Sequence[Mapping[str, Any]]) -> int | None:
    """The fingerprint of the prompts' token ids, the same for all engines; None where a call's ids are not known."""
    prompts = Fingerprint()
    for call in calls:
        if not call["prompt_ids"]:
            return None
        prompts.add(call["prompt_ids"])
    return prompts.value


def local_name(model: str) -> str:
    """The folder or Hugging Face id that a model name stands for. Raises: ModelError if it cannot be one."""
    if (Path(model).expanduser() / "config.json").is_file():
        return str(Path(model).expanduser())
    if model == "sprout":
        from graftlm.core.model.embedded import sprout_path

        return str(sprout_path())
    from graftlm.core.model.description import resolve

    return resolve(model)


def disable_framework_caches() -> None:
    """Let every call reach the engine: switch off the response caches of the frameworks that are loaded, for good.

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


def cpu_seconds() -> float:
    """CPU time of this process and its servers so far."""
    import psutil

    total = time.process_time()
    for pid in _server_pids():
        with contextlib.suppress(psutil.Error):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                times = process.cpu_times()
                total += times.user + times.system
    return total


def lost_share(other_cores: float, own_cores: float) -> float:
    """The share of their time in which this process's compute threads had no core, because others used so many.

    Cores that stayed idle are what this engine did not ask for. Below 0 where cores were left: values of short rounds
    are rough, and their mean is not.
    """
    import psutil

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    free = (psutil.cpu_count() or threads) - other_cores
    idle = free - own_cores
    return 1 - (free + idle) / threads


def energy_joules() -> float | None:
    """What the GPUs have used since the driver was loaded, by NVIDIA's counter; None where there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(torch.cuda.device_count())]
        return float(sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles)) / 1000
    except Exception:  # no package, or a card without the counter: there is no figure
        return None


def peak_memory() -> dict[str, int]:
    """The most memory that this process and its servers have held so far."""
    import resource

    torch = sys.modules.get("torch")
    gpu = torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_available() else 0
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": own + sum(map(_peak_of_tree, _server_pids())), "peak_gpu_bytes": gpu}


def _server_pids() -> list[int]:
    return [server.pid for server in Server.open if server.pid is not None]


def _peak_of_tree(pid: int) -> int:
    """Peak host memory of a process and its children, as far as the system tells it."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error, OSError):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return total


@contextlib.contextmanager
def _reporting(worker: Worker | None, say: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Say how many calls the engine has answered, five times a second."""
    ended = threading.Event()

    def report() -> None:
        while worker is not None and not ended.wait(0.2):
            say({"calls": worker.calls()})

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def serve(commands: TextIO, replies: TextIO) -> None:
    """Answer commands until there are no more."""
    lock = threading.Lock()

    def say(reply: dict[str, Any]) -> None:
        with lock:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()

    worker: Worker | None = None
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name == "load":
                worker = Worker(Path(command.pop("path")), **command)
                value: Any = worker.describe()
            else:
                with _reporting(worker if name == "round" else None, say):
                    value = getattr(worker, name)(**command)
            reply = {"value": value}
        except ConfigError as error:
            reply = {"config_error": str(error)}
        except BaseException as error:
            said = told(error) if worker is None else worker.told(error)
            text = "; ".join([said, *(one.end for one in Server.open if one.end)])
            reply = {"error": text, "remedy": remedy(error)}
        say(reply)


def end_with(parent: int) -> None:
    """Kill this process and the servers that it has started once `parent` is gone, whatever ended that."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)  # a group of its own, see `EngineProcess`


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    replies, commands = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a pipeline that reads its input finds none, and no commands
    serve(commands, replies)
    replies.flush()
    os._exit(0)  # without waiting for threads that a framework may have left behind


if __name__ == "__main__":
    main()
