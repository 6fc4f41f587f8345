"""LangChain: the same weights behind ChatGraftLM, HuggingFacePipeline, ChatHuggingFace and continuous batching."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import ToolMessage
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pydantic import BaseModel
from transformers import PreTrainedModel

import graftlm
from bench.frameworks._transformers import chat_pipeline, continuous_batching, same_weights, text_pipeline
from bench.harness import Options, Row, Timing, paired, rate_row, timed
from graftlm import Completion, Request, Runtime, Usage
from graftlm.adapters.langchain import ChatGraftLM

CASE = "langchain"
BATCH_SIZES = (1, 4, 16)


class Job(BaseModel):
    """A person and what the person works as."""

    name: str
    job: str


def run(options: Options) -> Sequence[Row]:
    with same_weights(options) as (runtime, model, tokenizer):
        return [
            *shared_system_prompt(options, runtime, model, tokenizer),
            *extraction(options, runtime, model, tokenizer),
            agent_loop(runtime),
            overhead(options, runtime),
        ]


def shared_system_prompt(options: Options, runtime: Runtime, theirs: PreTrainedModel, tokenizer: Any) -> list[Row]:
    """`batch` of chats that share a long system prompt."""
    num_chats, num_system, max_tokens = options.choose((16, 300, 8), (64, 1000, 32))
    system = tokenizer.decode(tokenizer.encode("The archive holds facts about people and places. " * 400)[:num_system])
    chats = [[("system", system), ("human", f"Question {i}: what does fact {i * 7} say?")] for i in range(num_chats)]
    llm = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=max_tokens, min_tokens=max_tokens)
    prompts = [tokenizer.apply_chat_template(_dicts(c), tokenize=False, add_generation_prompt=True) for c in chats]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    answers: dict[str, list[Any]] = {}

    def ours_batch() -> None:
        runtime.clear_cache()
        answers["graftlm"] = [message.content for message in llm.batch(chats)]

    some = prompts[: num_chats // 4]
    best = min(
        BATCH_SIZES, key=lambda size: timed(lambda: text_pipeline(theirs, tokenizer, max_tokens, size).batch(some))
    )
    text = text_pipeline(theirs, tokenizer, max_tokens, best)
    chat = chat_pipeline(theirs, tokenizer, max_tokens)

    def pipeline_batch() -> None:
        answers["pipeline"] = text.batch(prompts)

    def chat_batch() -> None:
        chat.batch(chats)

    def continuous() -> None:
        continuous_batching(theirs, ids, max_tokens)

    times = paired(
        {"graftlm": ours_batch, "pipeline": pipeline_batch, "chat": chat_batch, "continuous": continuous},
        options.choose(1, options.repeats),
        warm=False,
    )
    shape = {"chats": num_chats, "system_tokens": num_system, "max_tokens": max_tokens, "batch_size": best}
    equal = sum(a == b for a, b in zip(answers["graftlm"], answers["pipeline"], strict=True))
    what = f"batch of {num_chats} chats sharing {num_system:,} tokens"
    return [
        _chats(f"{what}, against HuggingFacePipeline(batch_size={best})", num_chats, times, "pipeline", 8, shape),
        _chats(f"{what}, against ChatHuggingFace", num_chats, times, "chat", 8, shape),
        _chats(f"{what}, against continuous batching", num_chats, times, "continuous", 3, shape),
        Row(CASE, "answers equal to HuggingFacePipeline", equal, "chats", floor=num_chats, shape=shape),
    ]


def extraction(options: Options, runtime: Runtime, theirs: PreTrainedModel, tokenizer: Any) -> list[Row]:
    """Structured output from many passages after four examples; the baseline asks for JSON and parses what comes."""
    examples, items = _inputs()
    items = (items * 64)[: options.choose(8, 64)]
    max_tokens = 48
    ask = "{passage}\n\nExtract a JSON object about {name} with the keys name and job."
    shots = [
        message
        for shot in examples
        for message in (
            ("human", ask.format(**shot)),
            ("ai", f'{{{{"name":"{shot["name"]}","job":"{shot["answer"]}"}}}}'),
        )
    ]
    prompt = ChatPromptTemplate.from_messages([*shots, ("human", ask)])
    ours = prompt | ChatGraftLM(runtime=runtime, temperature=0, max_tokens=max_tokens).with_structured_output(Job)
    chat = chat_pipeline(theirs, tokenizer, max_tokens, min_new_tokens=1)
    baseline = prompt | chat | PydanticOutputParser(pydantic_object=Job)
    got: dict[str, list[Any]] = {}

    def ours_batch() -> None:
        runtime.clear_cache()
        got["graftlm"] = ours.batch(items, return_exceptions=True)

    def transformers() -> None:
        got["transformers"] = baseline.batch(items, return_exceptions=True)

    times = paired({"graftlm": ours_batch, "transformers": transformers}, options.choose(1, options.repeats))
    valid = {name: sum(isinstance(answer, Job) for answer in answers) for name, answers in got.items()}
    right = {
        name: sum(isinstance(a, Job) and a.job == item["answer"] for a, item in zip(answers, items, strict=True))
        for name, answers in got.items()
    }
    count, what = len(items), f"structured output from {len(items)} passages"
    return [
        rate_row(CASE, what, "passages/s", count, times["graftlm"], times["transformers"], floor=10.0),
        Row(CASE, f"{what}: valid", valid["graftlm"], "passages", baseline=valid["transformers"], floor=count),
        Row(CASE, f"{what}: right", right["graftlm"], "passages", baseline=right["transformers"]),
    ]


def agent_loop(runtime: Runtime) -> Row:
    """Five turns of tool calls: what each computes beyond its new messages (the tail of a forced call never ran)."""

    @tool
    def find_person(name: str) -> str:
        """Look a person up."""
        return f"{name} is 34 and lives in Dorvik."

    llm = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=120)
    bound = llm.bind_tools([find_person], tool_choice="find_person")
    messages: list[Any] = [("system", "Look people up, one at a time. " * 20), ("human", "How old is Mara Velin?")]
    known, worst = 0, 0
    for turn in range(5):
        before = runtime.stats().computed_tokens
        answer = bound.invoke(messages)
        usage = answer.usage_metadata
        assert usage is not None
        if turn:
            worst = max(worst, runtime.stats().computed_tokens - before - (usage["input_tokens"] - known))
        known = usage["total_tokens"]
        (call,) = answer.tool_calls
        result = ToolMessage(find_person.invoke(call["args"]), tool_call_id=call["id"])
        messages += [answer, result, ("human", "And Teo Brandt?")]
    what = "agent loop of 5 turns: tokens computed in a turn beyond its new ones"
    return Row(CASE, what, worst, "tokens, worst turn", floor=8, at_most=True)


def overhead(options: Options, runtime: Runtime) -> Row:
    """What ChatGraftLM costs per call above LangChain's own fake model, with an engine that answers at once."""

    class Instant:
        """The runtime's tokenizer and name, and an answer to everything."""

        def __init__(self) -> None:
            self.tokenizer, self.model_name, self.max_model_len = runtime.tokenizer, "instant", 4096

        def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
            futures: list[Future[Completion]] = []
            for _ in requests:
                future: Future[Completion] = Future()
                future.set_result(Completion("hello", [1], "stop", Usage(10, 5, 1, 0)))
                futures.append(future)
            return futures

    fake, ours = FakeListChatModel(responses=["hello"]), ChatGraftLM(runtime=Instant(), temperature=0)
    calls = options.choose(200, 2000)
    per_call = {
        name: _cpu_ms(lambda llm=llm: llm.invoke("hi"), calls) for name, llm in (("fake", fake), ("ours", ours))
    }
    what = "cost of the adapter per call above LangChain's own"
    return Row(CASE, what, per_call["ours"] - per_call["fake"], "ms", floor=0.3, at_most=True)


def _cpu_ms(call: Callable[[], Any], count: int) -> float:
    """CPU milliseconds of one call, the best of five rounds."""
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(count):
            call()
        rounds.append((time.process_time() - started) / count * 1000)
    return min(rounds)


def _chats(what: str, count: int, times: dict[str, Timing], baseline: str, floor: float, shape: dict[str, Any]) -> Row:
    return rate_row(CASE, what, "chats/s", count, times["graftlm"], times[baseline], floor=floor, shape=shape)


def _inputs() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Examples and passages about people, each with a name and the right job."""
    path = Path(graftlm.__file__).parent / "demo" / "inputs.json"
    told = json.loads(path.read_text())["langchain"]
    return told["examples"], told["items"]


def _dicts(chat: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": {"human": "user"}.get(role, role), "content": text} for role, text in chat]
