"""VLLMEngine: vLLM offline behind the engine hook, so that a program of GraftLM runs on it without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graftlm.ab.engines.plain_engine import OneByOneEngine, checked, completion_of, prompt_of
from graftlm.core.errors import EngineError
from graftlm.core.grammar.spec import JsonSchema
from graftlm.core.request import Completion, Submission, TokenLogprob, Usage
from graftlm.plugins.hookspecs import Register, hookimpl

if TYPE_CHECKING:
    from graftlm.core.config import EngineConfig, SamplingParams
    from graftlm.core.text.tokenizer import Tokenizer

NAME = "vllm-offline"
MAX_MODEL_LEN = 16_384
MEMORY_SHARE = 0.42
"""The share of the card's memory that vLLM takes, so that another engine has as much."""


class VLLMEngine(OneByOneEngine):
    """Requests go to vLLM's engine as token ids; greedy or sampled text, stop strings, schemas, choices, scores.

    vLLM computes in a process of its own, as its `LLM` class does. JSON is compact, as GraftLM writes it. A constraint
    does not know of `max_tokens`: a text can end inside it.
    """

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        import vllm

        super().__init__(tokenizer)
        self.weights = "bfloat16"
        self._running: dict[str, Submission] = {}
        self._engine: Any = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=256,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=True,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        ).llm_engine

    @property
    def idle(self) -> bool:
        return not self.waiting and not self._running

    def step(self) -> bool:
        """Hand over what waits, then take what vLLM has finished."""
        while self.waiting:
            submission = self.waiting.popleft()
            try:
                self._begin(submission)
            except Exception as error:  # the request's own; the engine goes on
                submission.listener.on_error(error)
        if self._running:
            for output in self._engine.step():
                if output.finished and (found := self._running.pop(output.request_id, None)) is not None:
                    self._ended(found, output)
        return True

    def _begin(self, submission: Submission) -> None:
        request = submission.request
        if request.pin:
            submission.listener.on_finish(Completion("", [], "length", Usage()))
            return
        if request.want_logits:
            raise EngineError("vLLM returns no logits; run the program on GraftLM")
        ids = prompt_of(submission) + (request.score_ids or [])
        name = str(submission.id)
        self._running[name] = submission
        self.counters.largest_batch = max(self.counters.largest_batch, len(self._running))
        try:
            self._engine.add_request(name, {"prompt_token_ids": ids}, self._parameters(submission))
        except BaseException:
            del self._running[name]
            raise

    def _parameters(self, submission: Submission) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        whole = RequestOutputKind.FINAL_ONLY
        if submission.request.score_ids is not None:
            return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=whole)
        sampling = checked(submission.request.sampling)
        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens or MAX_MODEL_LEN - len(prompt_of(submission)),
            min_tokens=sampling.min_tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,  # `completion_of` cuts the text where it stops
            ignore_eos=sampling.ignore_eos,
            seed=sampling.seed,
            detokenize=bool(sampling.stop),
            structured_outputs=_structured(sampling) if submission.grammar is not None else None,
            output_kind=whole,
        )

    def _ended(self, submission: Submission, output: Any) -> None:
        request, num_cached = submission.request, output.num_cached_tokens or 0
        if request.score_ids is None:
            num_prompt = len(output.prompt_token_ids)
            done = completion_of(
                self.tokenizer, list(output.outputs[0].token_ids), request.sampling, num_prompt, num_cached
            )
        else:
            done = self._scored(request.score_ids, output)
        self.finish(submission, done)

    def _scored(self, continuation: list[int], output: Any) -> Completion:
        usage = Usage(len(output.prompt_token_ids) - 1, output.num_cached_tokens or 0, 0, 0)
        rows = output.prompt_logprobs[len(output.prompt_token_ids) - len(continuation) :]
        named = [
            TokenLogprob(token, self.tokenizer.decode([token]), row[token].logprob)
            for token, row in zip(continuation, rows, strict=True)
        ]
        return Completion("", [], "length", usage, named)

    def cancel(self, submission_id: int) -> None:
        super().cancel(submission_id)
        if self._running.pop(str(submission_id), None) is not None:
            self._engine.abort_request([str(submission_id)])

    def fail_all(self, error: BaseException) -> None:
        super().fail_all(error)
        self._engine.abort_request(list(self._running))
        while self._running:
            self._running.popitem()[1].listener.on_error(error)

    def clear_cache(self) -> None:
        self._engine.reset_prefix_cache()


def _structured(sampling: SamplingParams) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if sampling.json_schema is not None:
        schema = sampling.json_schema
        return StructuredOutputsParams(json=(schema if isinstance(schema, JsonSchema) else JsonSchema(schema)).text)
    if sampling.choices is not None:
        return StructuredOutputsParams(choice=list(sampling.choices))
    if sampling.regex is not None:
        return StructuredOutputsParams(regex=sampling.regex)
    raise EngineError("vLLM is given a JSON schema, choices or a regex; the request has another constraint")


def build_vllm(model: str, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None]) -> VLLMEngine:
    return VLLMEngine(model, tokenizer)


@hookimpl
def graftlm_register_engines(register: Register) -> None:
    register(NAME, f"{__name__}:build_vllm")
