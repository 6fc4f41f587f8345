"""Admission: whether a request fits the model and the KV pool, and within which bounds it runs."""

from __future__ import annotations

import random
from typing import NamedTuple

from graftlm.core.errors import ConfigError, RequestTooLong
from graftlm.core.sequence import Bounds, Sequence


class Limits(NamedTuple):
    """What a model and its KV pool can take.

    num_embeddings  token ids that the model knows
    extensible      whether the context is shorter than the model's own, because an option set it
    no_pictures     the reason for which prompts with pictures are refused
    no_modules      the reason for which prompts with modules are refused
    """

    max_model_len: int
    num_embeddings: int
    num_slots: int
    extensible: bool = False
    no_pictures: str | None = None
    no_modules: str | None = None


def admit(sequence: Sequence, limits: Limits, seeds: random.Random) -> Bounds:
    """Admit a request: how many tokens its sequences may generate, their seed and their deadline.

    seeds  for a request that brings none
    Raises ConfigError or RequestTooLong for one that can never run.
    """
    num_prompt = sequence.num_prompt_tokens
    if sequence.prompt.spans and limits.no_pictures is not None:
        raise ConfigError(limits.no_pictures)
    if sequence.prompt.modules and limits.no_modules is not None:
        raise ConfigError(limits.no_modules)
    scored = sequence.request.score_ids or [0]
    highest, lowest = int(max(sequence.prompt_ids.max(), *scored)), int(min(scored))
    if lowest < 0:
        raise ConfigError(f"score_ids holds token id {lowest}; ids are 0 to {limits.num_embeddings - 1:,}")
    if highest >= limits.num_embeddings:
        raise ConfigError(
            f"the prompt has token id {highest:,}, the model knows {limits.num_embeddings:,} ids; "
            "use ids of the model's own tokenizer"
        )
    unknown = next((i for i in sequence.sampling.stop_token_ids if not 0 <= i < limits.num_embeddings), None)
    if unknown is not None:
        raise ConfigError(
            f"stop_token_ids has token id {unknown:,}, the model knows 0 to {limits.num_embeddings - 1:,}: it would "
            "never stop there; use ids of the model's own tokenizer"
        )
    allowed = sequence.sampling.allowed_token_ids
    if allowed and not (min(allowed) >= 0 and max(allowed) < limits.num_embeddings):
        unknown = next(i for i in allowed if not 0 <= i < limits.num_embeddings)
        raise ConfigError(
            f"allowed_token_ids has token id {unknown:,}, the model knows 0 to {limits.num_embeddings - 1:,}; "
            "use ids of the model's own tokenizer"
        )
    biased = sequence.sampling.logit_bias
    if biased and not (min(biased) >= 0 and max(biased) < limits.num_embeddings):
        unknown = next(i for i in biased if not 0 <= i < limits.num_embeddings)
        raise ConfigError(
            f"logit_bias has token id {unknown:,}, the model knows 0 to {limits.num_embeddings - 1:,}; "
            "use ids of the model's own tokenizer"
        )
    generates = not sequence.scoring and not sequence.request.want_logits
    if num_prompt > limits.max_model_len - (1 if generates else 0):
        raise RequestTooLong(
            f"the prompt is {num_prompt:,} tokens, the context is {limits.max_model_len:,}; "
            f"shorten it{' or raise max_model_len' if limits.extensible else ''}",
            length=num_prompt,
            limit=limits.max_model_len,
        )
    sampling = sequence.sampling
    wanted = sampling.max_tokens
    room = limits.max_model_len - num_prompt
    max_new_tokens = (room if wanted is None else min(wanted, room)) if generates else 0
    needed = num_prompt + max_new_tokens
    if wanted is None and needed > limits.num_slots > num_prompt:
        max_new_tokens = limits.num_slots - num_prompt
    elif needed > limits.num_slots:
        raise RequestTooLong(
            f"prompt and max_tokens are {needed:,} tokens, the KV pool has {limits.num_slots:,} slots; "
            "lower max_tokens or raise CacheConfig.max_tokens",
            length=needed,
            limit=limits.num_slots,
        )
    seed = seeds.getrandbits(63) if sampling.seed is None else sampling.seed
    deadline_s = None if sampling.timeout is None else sequence.arrived_s + sampling.timeout
    remedy = " or raise max_model_len" if limits.extensible else ""
    if num_prompt + max_new_tokens == limits.num_slots < limits.max_model_len:
        remedy = " or raise CacheConfig.max_tokens"
    return Bounds(max_new_tokens, seed, deadline_s, remedy)
