"""What a user sets is checked where it is built: values, kinds and ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from graftlm.core.config import CacheConfig, EngineConfig, SamplingOptions, SamplingParams, SchedulerConfig
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": "12"}, "max_tokens is '12'; it must be a whole number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"n": None}, "n is None"),
        ({"temperature": "0"}, "temperature is '0'; it must be a finite number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -1}, r"temperature is -1; it must be 0 \(greedy\) or more"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"top_p": 0}, r"top_p is 0; it must lie in \(0, 1\]"),
        ({"stop": 5}, "stop is 5; give text or a list of texts"),
        ({"stop": [""]}, "stop strings must be non-empty text"),
        ({"stop": [5]}, "stop strings must be non-empty text"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids holds '5'"),
        ({"choices": "yes"}, "choices is 'yes'; give a list of texts"),
        ({"choices": [1, 2]}, "choices holds 1; it must hold text"),
        ({"choices": []}, "choices is empty"),
        ({"logit_bias": {"a": 1}}, "logit_bias is {'a': 1}"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 is nan"),
        ({"logprobs": 5}, "logprobs is 5; it must be True or False; top_logprobs takes a number"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        ({"close_on_length": "x"}, "close_on_length is 'x'; it must be True or False, or None"),
        ({"regex": 5}, "regex is 5; it must be text, or None"),
        ({"grammar": ["a"]}, r"grammar is \['a'\]; it must be text, or None"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices were both given"),
        ({"min_tokens": 9, "max_tokens": 3}, r"min_tokens \(9\) is above max_tokens \(3\)"),
        ({"timeout": 0}, "timeout is 0; it must be above 0 seconds"),
        ({"logit_bias": {3: 1e308}}, "logit_bias of token 3 is 1e.308; it must lie between -1e20 and 1e20"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias of token 3 is inf; it must lie between"),
        ({"logit_bias": {3: 10**2000}}, "logit_bias is {3: 1000"),
        ({"logit_bias": {2**64: 1.0}}, "logit_bias names token id 18446744073709551616"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token id -1"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias is {1.5: 1.0}"),
        ({"logit_bias": {True: 1.0}}, "logit_bias is {True: 1.0}"),
        ({"presence_penalty": -1e39}, "presence_penalty is -1e.39; it must lie between -1e6 and 1e6"),
        ({"frequency_penalty": 1e39}, "frequency_penalty is 1e.39; it must lie between -1e6 and 1e6"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty is 1e-50; it must lie between 1e-6 and 1e6"),
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e.39; it must lie between 1e-6 and 1e6"),
        ({"temperature": 10**2000}, "temperature is 1000.*; it must be a finite number"),
    ],
)
def test_a_wrong_sampling_value_is_named_with_what_it_must_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_options(**options)


def test_numbers_of_numpy_and_ids_as_text_are_taken() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), logit_bias={"7": -100})  # type: ignore[dict-item]
    assert params.max_tokens == 3
    assert params.logit_bias == {7: -100.0}


def test_a_bias_of_minus_infinity_forbids_a_token() -> None:
    assert SamplingParams(logit_bias={3: float("-inf")}).logit_bias == {3: float("-inf")}


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CacheConfig, {"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        (CacheConfig, {"eviction": "oldest"}, "eviction is 'oldest'; use 'lru', 'lfu'"),
        (CacheConfig, {"enabled": "off"}, "enabled is 'off'; it must be True or False"),
        (CacheConfig, {"memory_share": "half"}, r"memory_share is 'half'; it must lie in \(0, 1\]"),
        (CacheConfig, {"page_size": None}, "page_size is None; it must be a whole number, at least 1"),
        (SchedulerConfig, {"policy": "best"}, "policy is 'best'; use 'lpm'"),
        (SchedulerConfig, {"max_age_s": "2"}, "max_age_s is '2'; it must be a number"),
        (EngineConfig, {"dtype": "int3"}, "dtype is 'int3'; use 'auto'"),
        (EngineConfig, {"max_batch": 0}, "max_batch is 0; it must be at least 1"),
        (EngineConfig, {"max_batch": 2.5}, r"max_batch is 2\.5; it must be a whole number, at least 1"),
        (EngineConfig, {"max_step_tokens": "64"}, "max_step_tokens is '64'; it must be a whole number, .*, or None"),
        (EngineConfig, {"max_model_len": 1}, "max_model_len is 1; it must be at least 2 tokens, or None"),
        (EngineConfig, {"trust_remote_code": "no"}, "trust_remote_code is 'no'; it must be True or False$"),
        (EngineConfig, {"overlap": 3}, "overlap is 3; it must be True or False, or None"),
        (EngineConfig, {"seed": "x"}, "seed is 'x'; it must be a whole number, or None"),
        (EngineConfig, {"cache": {"max_tokens": 9}}, r"cache is \{'max_tokens': 9\}; give a CacheConfig"),
        (EngineConfig, {"schedule": "fcfs"}, "schedule is 'fcfs'; give a SchedulerConfig"),
        (EngineConfig.from_options, {"max_bach": 3}, "did you mean 'max_batch'"),
        (EngineConfig.from_options, {"gpu_memory_utilization": 0.9}, r"use cache=CacheConfig\(memory_share=...\)"),
        (EngineConfig.from_options, {"gpu_memory_utilisation": 0.9}, r"use cache=CacheConfig\(memory_share=...\)"),
        (EngineConfig.from_options, {"max_token": 8}, "use max_tokens= with a prompt: it is an option of a request"),
        (EngineConfig.from_options, {"max_num_seqs": 8}, "unknown runtime option 'max_num_seqs'; use max_batch"),
        (EngineConfig.from_options, {"device_map": {"": 0}}, "device is {'': 0}; all layers lie on one device"),
        (EngineConfig.from_options, {"device_map": "cpu", "device": "cpu"}, "device_map and device were both given"),
        (EngineConfig, {"revision": 3}, "revision is 3; it must be a branch, a tag or a commit"),
        (CacheConfig, {"max_token": 1}, "unknown option of CacheConfig 'max_token'; did you mean 'max_tokens'"),
        (SchedulerConfig, {"polcy": "lpm"}, "did you mean 'policy'"),
        (SamplingParams.from_options, {"max_new_tokens": 1}, "'max_new_tokens'; use max_tokens"),
        (SamplingParams.from_options, {"stop_sequences": ["."]}, "'stop_sequences'; use stop$"),
        (EngineConfig.from_options, {"token": "x"}, "'token'; use the environment variable HF_TOKEN"),
        (
            Runtime.from_pretrained,
            {"torch_dtype": "auto"},
            r"Runtime has one constructor, Runtime itself: Runtime\(model=",
        ),
    ],
)
def test_a_wrong_engine_value_is_named_with_what_it_must_be(
    kind: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_the_names_of_transformers_for_dtype_and_device_are_taken() -> None:
    import torch

    config = EngineConfig.from_options(torch_dtype=torch.bfloat16, device_map="auto")
    assert (config.dtype, config.device) == ("bfloat16", "auto")
    given: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert EngineConfig(**given) == EngineConfig(dtype="float32", device="cpu")


def test_type_checkers_know_every_sampling_parameter() -> None:
    assert list(SamplingOptions.__annotations__) == [field.name for field in fields(SamplingParams)]
