"""`ChatGraftLM.batch` submits its whole list at once: 64 messages are one engine batch."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import HumanMessage

from bench.frameworks._prompts import observed
from bench.harness import Options, Row
from graftlm import Runtime
from graftlm.adapters.langchain import ChatGraftLM


def run(options: Options) -> Sequence[Row]:
    chats = [[HumanMessage(f"Mara lives in Velm. Where does Mara live? Question {i}.")] for i in range(64)]
    with Runtime(options.model or "sprout") as runtime, observed(runtime) as prompts:
        runtime.load()
        ChatGraftLM(runtime=runtime, temperature=0, max_tokens=16).batch(chats)
        stats = runtime.stats()
    return [
        Row("batch", "largest batch of ChatGraftLM.batch, 64 chats", stats.largest_batch, "sequences", floor=64),
        Row(
            "batch",
            "prompt tokens computed, against unique prefix tokens",
            stats.computed_tokens,
            "tokens",
            baseline=prompts.num_unique,
            ratio=stats.computed_tokens / prompts.num_unique,
            at_most=True,
        ),
    ]
