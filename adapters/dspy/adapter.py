"""GraftAdapter: ChatAdapter's prompts, with replies that always parse."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import dspy
from dspy import lm15
from dspy.adapters.base import Adapter
from dspy.clients.call_result import legacy_output
from graftlm.adapters.dspy import wire as wire
from graftlm.adapters.dspy.field_order import FieldOrder
from graftlm.adapters.dspy.provider import runs_here
from graftlm.adapters.dspy.scaffold import Scaffold
from graftlm.core.call_options import keywords_of
from graftlm.core.config import reject_unknown

_NOT_SENT = ("n", "num_generations", "rollout_id", "prompt_cache", "cache")


class _Scaffolded(Adapter):
    """An adapter that adds a signature's scaffold to the request, and requests n answers at once.

    It stands between ChatAdapter and its base, so that ChatAdapter's fallback surrounds it.
    """

    def __call__(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        plan = _Plan.of(self, lm, lm_kwargs, signature, demos, inputs)
        if plan is None:
            answered: list[dict[str, Any]] = super().__call__(lm, lm_kwargs, signature, demos, inputs)
            return answered
        answers = [lm(request, **plan.controls) for request in plan.requests()]
        return plan.parse(answers)

    async def acall(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        plan = _Plan.of(self, lm, lm_kwargs, signature, demos, inputs)
        if plan is None:
            answered: list[dict[str, Any]] = await super().acall(lm, lm_kwargs, signature, demos, inputs)
            return answered
        answers = [await lm.acall(request, **plan.controls) for request in plan.requests()]
        return plan.parse(answers)


class GraftAdapter(dspy.ChatAdapter, _Scaffolded):
    """DSPy's chat format with the reply's headers forced and every field typed.

    Prompts are ChatAdapter's, byte for byte, so compiled programs keep their prompts and share their KV. A reply is
    one request for all fields: `Literal`, `bool` and enums choose among their options; numbers and dates follow
    a pattern; lists, dicts and pydantic models their schema; text ends before the next header. `n` answers are forks
    of one prompt. Over any other LM, or with native tool calls, it behaves as ChatAdapter.
    """

    def __init__(self, *, order_fields_by: Iterable[Any] | None = None, **options: Any) -> None:
        """Take ChatAdapter's own options.

        order_fields_by  example inputs, such as a trainset: input fields whose values rarely change in them come first
                         in every prompt, so that more is shared. The model reads another order, so answers may change
        """
        self._order = FieldOrder(order_fields_by) if order_fields_by is not None else None
        reject_unknown(list(options), sorted(keywords_of(dspy.ChatAdapter.__init__)), "GraftAdapter parameter")
        super().__init__(**options)
        self._systems = _PerSignature()
        self._scaffolds = _PerSignature()

    def format_system_message(self, signature: type[dspy.Signature]) -> str:
        known = self._systems.get(signature)
        if known is None:
            known = str(super().format_system_message(signature))
            self._systems.put(signature, known)
        return known

    def format_field_description(self, signature: type[dspy.Signature]) -> str:
        return str(super().format_field_description(self._ordered(signature)))

    def format_field_structure(self, signature: type[dspy.Signature]) -> str:
        return str(super().format_field_structure(self._ordered(signature)))

    def format_user_message_content(
        self, signature: type[dspy.Signature], inputs: dict[str, Any], *args: Any, **options: Any
    ) -> str:
        return str(super().format_user_message_content(self._ordered(signature), inputs, *args, **options))

    def _ordered(self, signature: type[dspy.Signature]) -> type[dspy.Signature]:
        return signature if self._order is None else self._order(signature)

    def scaffold(self, signature: type[dspy.Signature], calls: str = "") -> str:
        """Return the signature's scaffold as JSON text.

        calls  the JSON schema of fields of type `dspy.ToolCalls`, as text; "" without tools.
        """
        known = self._scaffolds.get(signature, calls)
        if known is None:
            known = Scaffold.of(signature, json.loads(calls) if calls else None).to_json()
            self._scaffolds.put(signature, known, calls)
        return known

    def __repr__(self) -> str:
        return "GraftAdapter()"

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in self.__dict__.items() if not isinstance(v, _PerSignature)}
        return _rebuild, (type(self), state)


# Adapter wraps `format` and `parse` of every subclass again, which would call callbacks twice.
del GraftAdapter.format, GraftAdapter.parse
# StreamListener finds its markers by the name of the adapter's class, and supports only DSPy's own names.
GraftAdapter.__name__ = "ChatAdapter"


def _rebuild(cls: type[GraftAdapter], state: dict[str, Any]) -> GraftAdapter:
    adapter = cls()
    adapter.__dict__.update(state)
    return adapter


class _PerSignature:
    """A cache of texts by signature class; an entry ends with its class or a change of its instructions."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Any, tuple[str, str, str]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, signature: Any, beside: str = "") -> str | None:
        known = self._texts.get(signature)
        return known[2] if known is not None and known[:2] == (signature.instructions, beside) else None

    def put(self, signature: Any, text: str, beside: str = "") -> None:
        with self._lock:
            self._texts[signature] = (signature.instructions, beside, text)


class _Plan:
    """One call of the adapter: its request, and the conversion of answers to fields."""

    def __init__(self, adapter: Any, lm: Any, lm_kwargs: Any, original: Any, processed: Any, request: Any) -> None:
        self._adapter = adapter
        self._lm = lm
        self._lm_kwargs = lm_kwargs
        self._original = original
        self._processed = processed
        self._request: lm15.Request = request
        merged = {**lm.kwargs, **lm_kwargs}
        self._n = int(merged.get("n") or merged.get("num_generations") or 1)
        self.controls = {k: merged[k] for k in ("rollout_id", "cache") if merged.get(k) is not None}

    @classmethod
    def of(cls, adapter: Any, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> _Plan | None:
        """Return the plan; None without a scaffold: for another engine, tools, or a format that the caller chose."""
        if not runs_here(lm) or lm.model_type != "chat":
            return None
        if lm_kwargs.get("response_format") or lm.kwargs.get("response_format"):
            return None
        kwargs = dict(lm_kwargs)
        processed = adapter._call_preprocess(lm, kwargs, signature, inputs)
        if kwargs.get("tools") or not processed.output_fields:
            return None
        messages = adapter.format(processed, demos, inputs)
        merged = {**lm.kwargs, **kwargs}
        body = {k: v for k, v in merged.items() if k not in _NOT_SENT and v is not None}
        request = lm15.request_from_openai_chat({**body, "model": lm.model, "messages": messages})
        scaffold = adapter.scaffold(processed, calls_schema(processed, inputs))
        extensions = {**(request.config.extensions or {}), wire.PROVIDER: {"scaffold": scaffold}}
        config = replace(request.config, extensions=extensions, cache=merged.get("prompt_cache"))
        return cls(adapter, lm, kwargs, signature, processed, replace(request, config=config))

    def requests(self) -> Iterator[lm15.Request]:
        """Yield one request for n answers; n requests of one answer if a listener follows the stream."""
        if self._n == 1:
            yield self._request
        elif dspy.settings.send_stream is not None:
            yield from [self._request] * self._n
        else:
            config = self._request.config
            native = {**config.extensions[wire.PROVIDER], "n": self._n}
            yield replace(
                self._request, config=replace(config, extensions={**config.extensions, wire.PROVIDER: native})
            )

    def parse(self, answers: list[lm15.Response]) -> list[dict[str, Any]]:
        outputs: list[Any] = []
        for answer in answers:
            if self._request.config.logprobs is not None:
                outputs.append(legacy_output(answer, logprobs=True))
            else:
                outputs.extend(wire.texts(answer))
        parsed: list[dict[str, Any]] = self._adapter._call_postprocess(
            self._processed, self._original, outputs, self._lm, self._lm_kwargs
        )
        return parsed


def calls_schema(signature: type[dspy.Signature], inputs: Mapping[str, Any]) -> str:
    """Return the schema as text: names of the tools among `inputs`, arguments as the tools declare them.

    "" if no output field holds calls, or no tools are passed.
    """
    if not any(field.annotation is dspy.ToolCalls for field in signature.output_fields.values()):
        return ""
    tools = [tool for value in inputs.values() for tool in _tools_in(value)]
    if not tools:
        return ""
    calls = {"type": "array", "items": {"anyOf": [_call(tool) for tool in tools]}}
    return json.dumps({"type": "object", "properties": {"tool_calls": calls}, "required": ["tool_calls"]})


def _tools_in(value: Any) -> Iterable[dspy.Tool]:
    values = value if isinstance(value, list | tuple) else [value]
    return (each for each in values if isinstance(each, dspy.Tool))


def _call(tool: dspy.Tool) -> dict[str, Any]:
    function = tool.format_as_litellm_function_call()["function"]
    arguments = {**function["parameters"], "additionalProperties": tool.has_kwargs}
    call = {"name": {"const": function["name"]}, "args": arguments}
    return {"type": "object", "properties": call, "required": list(call)}
