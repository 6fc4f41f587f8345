"""Engine plugins that run one request at a time, and transformers' `generate` as such an engine."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graftlm.ab.engines.frameworks import PLAIN
from graftlm.core.errors import EngineError
from graftlm.core.metrics import Counters, Stats
from graftlm.core.request import Chunk, Completion, FinishReason, Submission, TokenLogprob, Usage
from graftlm.core.text.detokenizer import unfinished_bytes
from graftlm.plugins.hookspecs import Register, hookimpl

if TYPE_CHECKING:
    from graftlm.core.config import EngineConfig, SamplingParams
from graftlm.core.text.tokenizer import Tokenizer

_TYPES = "token_type_ids", "mm_token_type_ids"
"""Names of the argument that tells pictures from text."""

_UNKNOWN = ("n", "top_p", "top_k", "min_p", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "logit_bias", "stop_token_ids")  # fmt: skip


class OneByOneEngine:
    """A first-come, first-served engine without batches and prefix cache.

    weights  the dtype of the weights, for `Stats`
    """

    weights: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.counters = Counters()
        self.waiting: deque[Submission] = deque()

    @property
    def idle(self) -> bool:
        return not self.waiting

    def add(self, submissions: Sequence[Submission]) -> None:
        self.waiting.extend(submissions)

    def step(self) -> bool:
        """Answer the oldest request."""
        submission = self.waiting.popleft()
        if submission.request.pin:  # no cache: a prefix computed ahead would be lost
            submission.listener.on_finish(Completion("", [], "length", Usage()))
            return True
        try:
            completion = self._answer(submission)
        except Exception as error:  # ends this request alone
            submission.listener.on_error(error)
            return True
        self.finish(submission, completion)
        return True

    def finish(self, submission: Submission, done: Completion) -> None:
        usage, counters = done.usage, self.counters
        counters.requests += 1
        counters.prompt_tokens += usage.prompt_tokens
        counters.computed_tokens += usage.prompt_tokens - usage.cached_tokens
        counters.completion_tokens += usage.completion_tokens
        counters.largest_batch = max(counters.largest_batch, 1)
        if submission.request.stream:
            submission.listener.on_chunk(Chunk(done.text, done.token_ids, None, done.finish_reason, usage))
        submission.listener.on_finish(done)

    def _answer(self, submission: Submission) -> Completion:
        """Compute the answer of a request that pins nothing. An exception ends that request alone."""
        raise NotImplementedError

    def cancel(self, submission_id: int) -> None:
        self.waiting = deque(one for one in self.waiting if one.id != submission_id)

    def fail_all(self, error: BaseException) -> None:
        while self.waiting:
            self.waiting.popleft().listener.on_error(error)

    def stats(self) -> Stats:
        return Stats(**vars(self.counters), weights=self.weights)

    def reset_stats(self) -> None:
        self.counters.reset()

    def clear_cache(self) -> None:
        """Do nothing: the engine has no cache."""

    def unpin(self, pin: int) -> None:
        """Do nothing: the engine has no cache."""

    def close(self) -> None:
        """Do nothing: the model is freed with the engine."""


def _model(model: str, config: EngineConfig) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from graftlm.core.media.processor import reads_pictures
    from graftlm.core.model.gguf.folder import description_folder, find_gguf
    from graftlm.core.model.weights import read_weights

    file = find_gguf(model)
    if file is not None:  # in seconds; transformers takes longer for the same values
        return read_weights(str(description_folder(file)), config, torch.device("cpu"))
    options = {} if config.dtype == "auto" else {"dtype": config.dtype}
    sees = reads_pictures(AutoConfig.from_pretrained(model))
    return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(model, **options)


class PlainEngine(OneByOneEngine):
    """An engine over transformers' `generate`: greedy or sampled text, stop strings, constraints, and scores.

    No KV is kept from one request to the next.
    """

    def __init__(self, model: str, config: EngineConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.model: Any = _model(model, config).eval()
        self.weights = str(self.model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def _answer(self, submission: Submission) -> Completion:
        request, ids = submission.request, prompt_of(submission)
        if request.score_ids is not None or request.want_logits:
            return self._score(ids, request.score_ids or [])
        sampling = checked(request.sampling)
        mask = [TokenMask(submission, len(ids))] if submission.grammar is not None else []
        limit = sampling.max_tokens or self.model.config.max_position_embeddings - len(ids)
        given = torch.tensor([ids], device=self.model.device)
        media = media_of(submission, self.model)
        # generate takes the model's end token where a configuration that is passed has none
        self.model.generation_config.eos_token_id = None if sampling.ignore_eos else list(self.tokenizer.eos_token_ids)
        output = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            **media,
            max_new_tokens=limit,
            min_new_tokens=sampling.min_tokens,
            do_sample=sampling.temperature > 0,
            **({"temperature": sampling.temperature} if sampling.temperature > 0 else {}),
            **({"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer.complete} if sampling.stop else {}),
            logits_processor=mask,
            pad_token_id=self.tokenizer.eos_token_ids[0],
        )[0, len(ids) :].tolist()
        return completion_of(self.tokenizer, output, sampling, len(ids))

    def _score(self, ids: list[int], continuation: list[int]) -> Completion:
        logits = self.model(torch.tensor([ids + continuation], device=self.model.device)).logits[0].float()
        usage = Usage(len(ids) + max(0, len(continuation) - 1), 0, 0, 0)  # the last token's logits are not needed
        if not continuation:
            return Completion("", [], "length", usage, logits=logits[-1].cpu().numpy())
        rows = torch.log_softmax(logits[len(ids) - 1 : -1], -1)
        scores = rows.gather(1, torch.tensor(continuation, device=rows.device)[:, None])[:, 0].tolist()
        named = [TokenLogprob(i, self.tokenizer.decode([i]), s) for i, s in zip(continuation, scores, strict=True)]
        return Completion("", [], "length", usage, named)


class TokenMask:
    """A logits processor that masks the tokens that a grammar refuses."""

    def __init__(self, submission: Submission, num_prompt: int) -> None:
        if submission.grammar is None:
            raise EngineError("the request has no grammar")
        self._matcher = submission.grammar.result().matcher()
        self._num_seen = num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._matcher.advance(input_ids[0, self._num_seen :].tolist())
        self._num_seen = input_ids.shape[1]
        row = np.zeros((scores.shape[1] + 31) // 32, np.int32)
        if not self._matcher.fill_mask(row):
            return scores
        allowed = torch.from_numpy(np.unpackbits(row.view(np.uint8), bitorder="little")[: scores.shape[1]].astype(bool))
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


def checked(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters. Raises: EngineError for one that these engines do not support."""
    plain = type(sampling)()
    asked = [f"{name}={value!r}" for name in _UNKNOWN if (value := getattr(sampling, name)) != getattr(plain, name)]
    if asked:
        raise EngineError(f"this engine behind the engine hook does not know {', '.join(asked)}; leave them out")
    return sampling


def prompt_of(submission: Submission) -> list[int]:
    """Return the token ids of a prompt, with the model's placeholders for its pictures."""
    if submission.prompt is None:
        raise EngineError("the request has no token ids")
    ids: list[int] = submission.prompt.model_ids.tolist()
    return ids


def media_of(submission: Submission, model: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for the pictures of a prompt, and forget those of the prompt before."""
    spans = submission.prompt.spans if submission.prompt is not None else ()
    if not spans:
        return {}
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    items = [span.values.item for span in spans if span.values.first == 0]
    types = np.zeros(len(submission.prompt or ()), np.int64)
    for span in spans:
        types[span.start : span.stop] = 1 if span.values.item.kind == "image" else 2
    found: dict[str, list[Any]] = {}
    for item in items:
        for name, value in item.tensors().items():
            found.setdefault(name, []).append(value)
    known = inspect.signature(model.forward).parameters
    given = {name: torch.cat(values).to(model.device) for name, values in found.items() if name in known}
    typed = {name: torch.from_numpy(types)[None].to(model.device) for name in _TYPES if name in known}
    return {**{name: x.to(model.dtype) if x.is_floating_point() else x for name, x in given.items()}, **typed}


def completion_of(
    tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams, num_prompt: int, num_cached: int = 0
) -> Completion:
    """Build the answer of generated ids: its text up to the end token or the first stop string."""
    stop, ends = sampling.stop, () if sampling.ignore_eos else tokenizer.eos_token_ids
    ended = next((i for i, token in enumerate(ids) if token in ends), None)
    text = tokenizer.decode(ids[:ended])
    found = min(((text.find(one), one) for one in stop if one in text), default=None)
    if found is not None:
        text = text[: found[0]]
    reason: FinishReason = "stop" if ended is not None or found is not None else "length"
    if reason == "length" and unfinished_bytes(tokenizer, ids):
        text = text.removesuffix("\ufffd")  # the limit cut a character
    num_new = len(ids) if ended is None else ended + 1
    return Completion(text, ids[:ended], reason, Usage(num_prompt, num_cached, num_new, 0), stop=found and found[1])


def build_plain(model: str, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None]) -> PlainEngine:
    return PlainEngine(model, config, tokenizer)


build_plain.takes_media = True  # type: ignore[attr-defined]


@hookimpl
def graftlm_register_engines(register: Register) -> None:
    """Offer the engine on which `graftlm ab` runs GraftLM's own programs with transformers."""
    register(PLAIN, build_plain)
