"""Engines by name: each framework's own class over a model, so that a pipeline file needs no constructor lines."""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from graftlm.ab.engines.servers import SERVERS, Server
from graftlm.plugins.manager import load as load_plugins

Constructor = Callable[..., Any]

MAX_TOKENS = 256
"""Most generated tokens per call, the same for every engine; a pipeline file may set its own `max_tokens`."""

_ROOTS = {
    **dict.fromkeys(("langchain", "langchain_core", "langchain_openai", "langchain_anthropic"), "langchain"),
    **dict.fromkeys(("langchain_ollama", "langchain_huggingface", "langchain_community", "langgraph"), "langchain"),
    "dspy": "dspy",
    "llama_index": "llama_index",
    "guidance": "guidance",
    "graftlm": "native",
}
FRAMEWORKS = tuple(sorted(set(_ROOTS.values())))
PLAIN = "ab-hf"
"""The engine plugin that runs transformers behind GraftLM's runtime."""
_PIP_NAMES = {
    "fastapi": "'transformers[serving]'",
    "llama_cpp": "'llama-cpp-python[server]'",
    "llama_index": "llama-index-core",
}


def framework_of_package(name: str) -> str | None:
    """Return the framework that a module or package belongs to; None for any other."""
    return _ROOTS.get(name.partition(".")[0])


def framework_of(source: str) -> str | None:
    """Return the framework that a pipeline's module-level imports name first; "native": GraftLM's own programs."""
    for node in ast.parse(source).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if (found := framework_of_package(name)) is not None:
                return found
    return None


def remedy(error: BaseException) -> str:
    """Return advice for an engine's error; empty for an unknown one."""
    if isinstance(error, NotImplementedError | AttributeError) and "async" in str(error).lower():
        return "the stock class has no asynchronous calls; compare with --engines hf-batching,graftlm"
    if isinstance(error, NotImplementedError):
        return "the stock class of this engine cannot do what the pipeline asks; name another engine, as openai:URL"
    return pip_command(error)


def pip_command(error: BaseException) -> str:
    """Return the command that installs the package that `error`, or its cause, misses; empty for any other error."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, ImportError) and not error.name and isinstance(cause, ImportError):
        error = cause  # transformers' lazy modules raise an error of their own, which names no package
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    root, *parts = error.name.split(".")
    if root == "llama_index" and len(parts) > 1:  # each integration is a package: llama_index.llms.openai
        return f"pip install {'-'.join([root, *parts[:2]]).replace('_', '-')}"
    return f"pip install {_PIP_NAMES.get(root) or root.replace('_', '-')}"


def load(module: str) -> Any:
    """Import a module; a ModuleNotFoundError names the module even where Python names its empty namespace."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(f"{error.name}."):
            error.name = module
        raise


def import_packages(framework: str | None, engine: str) -> None:
    """Import what an engine of this process needs, as far as it is installed, so that `open` has less to do.

    Imports of several processes run at the same time; engines open one after the other, as each looks for free memory.
    """
    own = (
        "graftlm.core.engine_builder",
        "graftlm.core.model.load",
        "tokenizers",
        "transformers.utils.chat_template_utils",
    )
    plain = ("transformers.generation", "transformers.models.auto.modeling_auto", "transformers.modeling_utils")
    packages: Mapping[str, Mapping[str, tuple[str, ...]]] = {
        "graftlm": {
            name: (*own, f"graftlm.adapters.{name}", *plain * (name == "guidance")) for name in FRAMEWORKS
        },  # Guidance's tokenizer class loads all of transformers
        "hf": {
            "langchain": ("transformers.pipelines", "langchain_huggingface", *plain),
            "llama_index": ("llama_index.llms.huggingface", *plain),
            "dspy": plain,
            "guidance": plain,
        },
    }
    for module in packages.get(engine, {}).get(framework or "", ()):
        with suppress(Exception):  # an error belongs to the engine, which opens next
            importlib.import_module(module)


def named_engines(framework: str | None, max_tokens: int) -> Mapping[str, Constructor]:
    """Return the constructors of a framework's engines by name; all engines are greedy.

    A constructor takes the model, as a folder or a Hugging Face id. A server's constructor also takes another name of
    the model, such as a GGUF file, or the URL of a running server; `openai` takes a URL, as URL#NAME where the endpoint
    has another name for the model. Engines that plugins register run under GraftLM's class.
    """
    if framework is None:
        return {}
    build = _BUILDERS[framework]
    known: dict[str, Constructor] = {
        "hf": partial(_transformers, build, max_tokens),
        "graftlm": lambda model: build("graftlm", max_tokens, model=model),
        "openai": partial(_connect, partial(build, "openai", max_tokens)),
        **{name: partial(_serve, partial(build, "openai", max_tokens), name) for name in SERVERS},
    }
    if framework == "guidance":
        known["guidance"] = known["hf"]
    taken = {"local", "scripted", "hf", "graftlm", "openai"}
    for name in load_plugins().engines:  # for GraftLM's programs, in place of a server of that name
        if name not in (taken if framework == "native" else taken | known.keys()):
            known[name] = partial(_of_plugin, build, name, max_tokens)
    return known


def _transformers(build: Constructor, max_tokens: int, model: str) -> Any:
    """Build the stock class; for a model that reads pictures, GraftLM's class over transformers' `generate`.

    The stock classes read text only, and most cannot load such a model.
    """
    if build is not _native and _reads_pictures(model):
        return build("graftlm", max_tokens, runtime=_native("hf", max_tokens, model))
    return build("hf", max_tokens, model)


def _reads_pictures(model: str) -> bool:
    with suppress(Exception):  # the stock class says what is wrong
        config = load("transformers").AutoConfig.from_pretrained(model)
        return bool(load("graftlm.core.media.processor").reads_pictures(config))
    return False


def _connect(client: Constructor, model: str, url: str) -> Any:
    """Build the client of a running server."""
    url, _, name = url.partition("#")
    return client(name or model, Server.at(url).url)


def _serve(client: Constructor, server: str, model: str, own: str = "") -> Any:
    """Build the client of a server that is started here; `own` is another name of the model, or a running server."""
    if "://" in own:
        url, _, name = own.partition("#")
        return _connect(client, model, f"{url.rstrip('/').removesuffix('/v1')}/v1#{name}")
    return client(own or model, Server.start(server, own or model).url)


def _of_plugin(build: Constructor, name: str, max_tokens: int, model: str) -> Any:
    return build("graftlm", max_tokens, runtime=load("graftlm.core.runtime").Runtime(model, engine=name))


# -- one builder per framework ---------------------------------------------------------------------------------
# kind "hf" takes the model, "openai" the model and a URL, "graftlm" the keyword `model` or `runtime`


def _key() -> str:
    return os.environ.get("GRAFTLM_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"


def _langchain(kind: str, max_tokens: int, *model: str, **where: Any) -> Any:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}
    if kind == "graftlm":
        return load("graftlm.adapters.langchain").ChatGraftLM(**where, **greedy)
    if kind == "openai":
        name, url = model
        return load("langchain_openai").ChatOpenAI(model=name, base_url=url, api_key=_key(), **greedy)
    huggingface = load("langchain_huggingface")
    generation = {"max_new_tokens": max_tokens, "do_sample": False, "return_full_text": False}
    pipeline = huggingface.HuggingFacePipeline.from_model_id(*model, task="text-generation", pipeline_kwargs=generation)
    return huggingface.ChatHuggingFace(llm=pipeline)


def _llama_index(kind: str, max_tokens: int, *model: str, **where: Any) -> Any:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}
    if kind == "graftlm":
        return load("graftlm.adapters.llama_index").GraftLLM(**where, **greedy)
    if kind == "openai":
        name, url = model
        like = load("llama_index.llms.openai_like").OpenAILike
        return like(model=name, api_base=url, api_key=_key(), is_chat_model=True, **greedy)
    (name,) = model
    llm = load("llama_index.llms.huggingface").HuggingFaceLLM(
        model_name=name, tokenizer_name=name, is_chat_model=True, max_new_tokens=max_tokens,
        generate_kwargs={"do_sample": False},
    )  # fmt: skip
    if getattr(llm._tokenizer, "chat_template", None):  # `complete` sends a chat, as OpenAILike and GraftLLM do
        message = load("llama_index.core.llms").ChatMessage(content="{query_str}")
        llm.query_wrapper_prompt = load("llama_index.core").PromptTemplate(llm.messages_to_prompt([message]))
    return llm


def _guidance(kind: str, max_tokens: int, *model: str, **where: Any) -> Any:
    """Build Guidance's model. `max_tokens` is unused, because each `gen` has its own limit."""
    if kind == "graftlm":
        return load("graftlm.adapters.guidance").GraftModel(**where, echo=False)
    models = load("guidance").models
    if kind == "openai":
        name, url = model
        return models.OpenAI(name, base_url=url, api_key=_key(), echo=False)
    mend_crop()
    return models.Transformers(*model, echo=False, enable_monitoring=False)


def _dspy(kind: str, max_tokens: int, *model: str, **where: Any) -> Any:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens, "cache": False}
    if kind == "graftlm":
        return load("graftlm.adapters.dspy").GraftLM(**where, **greedy)
    if kind == "openai":
        name, url = model
        return load("dspy").LM(f"openai/{name}", api_base=url, api_key=_key(), **greedy)
    engine = TransformersEngine(*model)
    return load("dspy").LM("local/transformers", engine=engine, async_engine=AsyncTransformersEngine(engine), **greedy)


def _native(kind: str, max_tokens: int, *model: str, **where: Any) -> Any:
    """Build the runtime of GraftLM's own programs; transformers runs as an engine plugin."""
    runtime = load("graftlm.core.runtime").Runtime
    if kind == "graftlm":
        return where["runtime"] if "runtime" in where else runtime(where["model"])
    if kind == "openai":
        name, url = model
        return runtime(name, base_url=url, api_key=_key())
    plugin = load("graftlm.ab.engines.plain_engine")
    if PLAIN not in load_plugins().engines:
        load_plugins().add("graftlm-ab", plugin)
    return runtime(*model, engine=PLAIN)


_BUILDERS: Mapping[str, Constructor] = {
    "langchain": _langchain,
    "llama_index": _llama_index,
    "guidance": _guidance,
    "dspy": _dspy,
    "native": _native,
}


class TransformersEngine:
    """A DSPy engine over transformers' `generate`, with the chat template, one call at a time."""

    def __init__(self, model: str) -> None:
        transformers = load("transformers")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model)
        self.lock = threading.Lock()

    def complete(self, request: Any) -> Any:
        lm15 = load("dspy").lm15
        messages = [{"role": m.role, "content": m.text} for m in request.messages]
        if request.system:
            messages.insert(0, {"role": "system", "content": str(request.system)})
        given = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with self.lock:
            output = self.model.generate(**given, max_new_tokens=request.config.max_tokens, do_sample=False)
        new = output[0, given["input_ids"].shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        usage = lm15.Usage(input_tokens=given["input_ids"].shape[1], output_tokens=len(new))
        return lm15.Response(None, request.model, lm15.Message.assistant(text), "stop", usage)

    def stream(self, request: Any) -> Iterator[Any]:
        """Yield the events of an answer that comes as one piece."""
        yield from load("dspy").lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Keep the model: it lives as long as the process."""


class AsyncTransformersEngine:
    """A TransformersEngine for event loops; a thread generates, so that the loop is not blocked."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    async def complete(self, request: Any) -> Any:
        return await asyncio.to_thread(self.engine.complete, request)

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        for event in load("dspy").lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Keep the model: it lives as long as the process."""


def mend_crop() -> None:
    """Let Guidance 0.3 run on current transformers, whose caches no longer crop to a length.

    `crop(n)` with n above 0 used to keep n tokens and now raises; below 0 it still removes the last |n| tokens.
    """
    cache = load("transformers").Cache
    crop = cache.crop
    if getattr(crop, "mended", False):
        return

    def crop_to(self: Any, length: int) -> None:
        surplus = self.get_seq_length() - length if length >= 0 else -length
        if surplus:
            crop(self, -surplus)

    crop_to.mended = True  # type: ignore[attr-defined]
    cache.crop = crop_to
