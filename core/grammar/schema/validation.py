"""Judge finished texts by their JSON schema, where a mask cannot keep it: by jsonschema, in a process apart."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graftlm.core.errors import ConfigError, EngineError, GrammarError
from graftlm.core.grammar.spec import Issue, JsonSchema
from graftlm.kernels.jit import python_process

SECONDS = 10.0
"""How long one text may take; the start of the process, which takes a second or two, is part of the first one's."""


def require_validator() -> None:
    """Raise ConfigError unless jsonschema is installed."""
    if find_spec("jsonschema") is None:
        raise ConfigError(
            "on_unsupported='check' judges texts with jsonschema, which is not installed; "
            "pip install 'jsonschema[format]', or use on_unsupported='warn'"
        )


class Validator:
    """A process that judges texts, one at a time. It starts with the first text and ends with this process."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def complaint(self, spec: JsonSchema, text: str, unkept: Sequence[Issue] = ()) -> str | None:
        """What is wrong with `text`; None if nothing is.

        unkept  what the mask left out; formats among them must be known to the judge.
        Raises GrammarError when the text cannot be judged, or not in time.
        """
        formats = [
            _value_at(spec.schema, issue.pointer)
            for issue in unkept
            if issue.keyword == "format" and issue.pointer.startswith("/")
        ]
        job = {"schema": spec.text, "documents": spec.documents_text, "formats": formats, "text": text}
        answer = self._ask(json.dumps(job))
        if "failure" in answer:
            raise GrammarError(f"the answer cannot be checked against its schema: {answer['failure']}")
        found: str | None = answer["complaint"]
        return found

    def _ask(self, line: str) -> dict[str, Any]:
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = _start()
            assert process.stdin is not None and process.stdout is not None
            is_late = threading.Event()

            def stop() -> None:
                is_late.set()
                process.kill()

            late = threading.Timer(self._seconds, stop)
            late.start()
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            finally:
                late.cancel()
            if not answer:
                reason = f"took longer than {self._seconds:g} s" if is_late.is_set() else "ended its process"
                self._end()
                raise GrammarError(
                    f"checking the answer against its schema {reason}; simplify the patterns of the schema"
                )
            found: dict[str, Any] = json.loads(answer)
            return found

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            process.wait()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


def _start() -> subprocess.Popen[str]:
    if not sys.executable:
        raise EngineError("this Python does not know its own program, which on_unsupported='check' starts")
    return python_process.start(
        (str(Path(__file__).with_name("validator.py")),),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C is for the process that waits
    )


def _value_at(schema: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    return schema


_shared = Validator()


def complaint(spec: JsonSchema, text: str, unkept: Sequence[Issue] = ()) -> str | None:
    """`Validator.complaint` of the judge of this process."""
    return _shared.complaint(spec, text, unkept)


def _start_over() -> None:
    global _shared
    _shared = Validator()


atexit.register(lambda: _shared.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)  # the parent's process and its pipes are the parent's
