"""One-shot jobs of command-line clients: coding agents, an evaluator, a prompt runner, and a proxy between.

Each program runs unchanged in an empty folder that is its home, with a configuration that names the server. The
prompts of coding agents are longer than sprout's context, therefore they get a short one of their own. Arguments: the
server, names of programs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else ""
FOLDER = Path.cwd()
"""The folder of the client: its npm packages, or its Python packages."""
ASK = "Mara is a baker. What is Mara?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "job": {"type": "string"}},
    "required": ["name", "job"],
    "additionalProperties": False,
}
TIMEOUT_S = 600
KEY = "sk-local"
"""The key of litellm's proxy, which needs one."""


def ran(home: Path, *command: str, **variables: str) -> str:
    """Run a program in its home and return its standard output. Raises RuntimeError for another exit status than 0."""
    known = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "HOME": str(home),
        "PYTHONPATH": str(FOLDER),
    }
    done = subprocess.run(
        command,
        cwd=home,
        env=known | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


def program(name: str) -> str:
    return str(FOLDER / "node_modules" / ".bin" / name)


def codex(home: Path) -> None:
    """The Responses API with the agent's own tools: namespaces, a hosted search; commands run in its sandbox."""
    (home / "prompt.md").write_text("You are a coding agent. Answer briefly.")
    (home / "config.toml").write_text(
        'model = "sprout"\nmodel_provider = "graftlm"\nmodel_context_window = 4096\n'
        'model_instructions_file = "prompt.md"\n'
        "[features]\nmulti_agent = false\ngoals = false\n"
        f'[model_providers.graftlm]\nname = "GraftLM"\nbase_url = "{URL}/v1"\nwire_api = "responses"\n'
    )
    given = ("exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only")
    lines = ran(home, program("codex"), *given, ASK, CODEX_HOME=str(home)).splitlines()
    kinds = [json.loads(line)["type"] for line in lines if line.startswith("{")]
    assert kinds[0] == "thread.started" and kinds[-1] == "turn.completed", kinds


def opencode(home: Path) -> None:
    options = {"baseURL": f"{URL}/v1", "apiKey": "none"}
    models = {"sprout": {"name": "sprout", "limit": {"context": 4096, "output": 256}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "GraftLM", "options": options, "models": models}
    agent = {"mode": "primary", "prompt": "Answer briefly.", "tools": {"*": False, "read": True}}
    config = {"model": "graftlm/sprout", "small_model": "graftlm/sprout", "autoupdate": False, "share": "disabled"}
    config |= {"provider": {"graftlm": provider}, "agent": {"small": agent}}
    (home / "opencode.json").write_text(json.dumps(config))
    lines = ran(home, program("opencode"), "run", "--agent", "small", "--format", "json", ASK).splitlines()
    assert any(json.loads(line)["type"] in ("text", "tool_use") for line in lines if line.startswith("{")), lines


def claude(home: Path) -> None:
    """The Messages API with context management and adaptive thinking, as the agent sends it."""
    variables = {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none"}
    variables |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    given = ("--model", "sprout", "--system-prompt", "Answer briefly.", "--tools", "Read", "--output-format", "json")
    answer = json.loads(ran(home, program("claude"), "-p", ASK, *given, **variables))
    assert answer["subtype"] == "success" and answer["result"], answer


def promptfoo(home: Path) -> None:
    """Two prompts on chat, on responses and under a schema, each with an assertion."""
    known: dict[str, Any] = {"apiBaseUrl": f"{URL}/v1", "apiKey": "none", "temperature": 0}
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    providers = [
        {"id": "openai:chat:sprout", "label": "chat", "config": {**known, "max_tokens": 80}},
        {"id": "openai:responses:sprout", "label": "responses", "config": {**known, "max_output_tokens": 80}},
        {
            "id": "openai:chat:sprout",
            "label": "schema",
            "config": {**known, "max_tokens": 80, "response_format": named},
        },
    ]
    tests = [{"vars": {"job": job}, "assert": [{"type": "contains", "value": job}]} for job in ("baker", "pilot")]
    config = {"prompts": ["Mara is a {{job}}. What is Mara?"], "providers": providers, "tests": tests}
    (home / "config.json").write_text(json.dumps(config))
    variables = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
    variables["PROMPTFOO_CONFIG_DIR"] = str(home / "promptfoo")
    ran(
        home,
        program("promptfoo"),
        "eval",
        "-c",
        "config.json",
        "--no-progress-bar",
        "--no-cache",
        "-o",
        "out.json",
        **variables,
    )
    counted = json.loads((home / "out.json").read_text())["results"]["stats"]
    assert (counted["successes"], counted["failures"], counted["errors"]) == (6, 0, 0), counted


def llm(home: Path) -> None:
    model: dict[str, Any] = {"model_id": "sprout", "model_name": "sprout", "api_base": f"{URL}/v1"}
    model |= {"supports_schema": True, "supports_tools": True}
    (home / "extra-openai-models.yaml").write_text(json.dumps([model]))
    (home / "keys.json").write_text('{"openai": "none"}')

    def prompted(*given: str) -> str:
        command = (sys.executable, "-m", "llm", "-m", "sprout", "-o", "temperature", "0", "-o", "max_tokens", "80")
        return ran(home, *command, *given, LLM_USER_PATH=str(home))

    assert "baker" in prompted(ASK)
    assert json.loads(prompted("--no-stream", "--schema", "name, job", ASK)).keys() == {"name", "job"}
    tool = 'def weather(city: str) -> str:\n    """The weather of a city."""\n    return f"sun in {city}"'
    assert "sun" in prompted("--functions", tool, "What is the weather in Rome?")


def aider(home: Path) -> None:
    given = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics"]
    given += ["--map-tokens", "0", "--edit-format", "whole", "--no-pretty"]
    variables = {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": f"{URL}/v1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    written = ran(
        home, sys.executable, "-m", "aider", "--model", "openai/sprout", *given, "--message", ASK, **variables
    )
    assert re.search(r"Tokens: \d+ sent, [1-9]\d* received", written), written


def litellm_proxy(home: Path) -> None:
    """litellm's proxy before the server: an answer, a stream, a tool, a schema; then Anthropic's form through it."""
    params = {"model": "openai/sprout", "api_base": f"{URL}/v1", "api_key": "none"}
    config: dict[str, Any] = {"model_list": [{"model_name": "through", "litellm_params": params}]}
    config |= {"general_settings": {"master_key": KEY}}
    (home / "config.yaml").write_text(json.dumps(config))
    port = str(10_000 + os.getpid() % 20_000)
    code = "from litellm import run_server; run_server()"
    command = [sys.executable, "-c", code, "--config", "config.yaml", "--port", port, "--host", "127.0.0.1"]
    known = os.environ | {"HOME": str(home), "PYTHONPATH": str(FOLDER), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(command, cwd=home, env=known, stdout=log, stderr=log) as proxy,
    ):
        try:
            end_s = time.monotonic() + TIMEOUT_S
            while not _answers(f"http://127.0.0.1:{port}/health/liveliness"):
                if proxy.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"the proxy did not start: {(home / 'log').read_text()[-2000:]}")
                time.sleep(0.5)
            _asked_through(f"http://127.0.0.1:{port}")
        finally:
            proxy.terminate()


def _asked_through(url: str) -> None:
    user = [{"role": "user", "content": ASK}]
    body: dict[str, Any] = {"model": "through", "messages": user, "temperature": 0, "max_tokens": 80}
    text = json.loads(_posted(f"{url}/v1/chat/completions", body))["choices"][0]["message"]["content"]
    assert "baker" in text
    streamed = _posted(f"{url}/v1/chat/completions", {**body, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == text
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    called = json.loads(_posted(f"{url}/v1/chat/completions", {**body, "tools": [tool], "tool_choice": "required"}))
    assert "city" in json.loads(called["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    found = json.loads(_posted(f"{url}/v1/chat/completions", {**body, "response_format": named}))
    assert json.loads(found["choices"][0]["message"]["content"]).keys() == {"name", "job"}
    message = json.loads(_posted(f"{url}/v1/messages", {"model": "through", "messages": user, "max_tokens": 80}))
    assert any(block["type"] == "text" and block["text"] for block in message["content"]), message


def _posted(url: str, body: Mapping[str, Any]) -> str:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


JOBS: dict[str, Callable[[Path], None]] = {
    "codex": codex,
    "opencode": opencode,
    "claude": claude,
    "promptfoo": promptfoo,
    "llm": llm,
    "aider": aider,
    "litellm-proxy": litellm_proxy,
}


def main() -> int:
    failed = 0
    for name in sys.argv[2:] or JOBS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as home:
            try:
                JOBS[name](Path(home))
                how = "passed"
            except Exception:
                how, failed = "FAILED", failed + 1
                traceback.print_exc()
        print(f"{name}: {how} in {time.monotonic() - started:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
