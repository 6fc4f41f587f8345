from __future__ import annotations

import json
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.logging import is_progress_bar_enabled

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.execution.paged import PagedRunner
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.load import load_model
from graftlm.core.model.qualify import stretched_context
from graftlm.core.state_layers.state_layers import FAMILIES
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.kv_store import allocate_kv
from tests.models import EOS, IM_END, VOCAB_SIZE, byte_tokenizer, greedy_reference, random_prompt, tiny_model
from tests.stepping import paged_greedy

CPU = EngineConfig(device="cpu")


def load(kind: str = "llama", config: EngineConfig = CPU, **overrides: Any) -> LoadedModel:
    return load_model(tiny_model(kind, **overrides), config, byte_tokenizer())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a network call was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# -- what is known of a loaded model ------------------------------------------------------------------------------


def test_a_loaded_model_knows_its_shape_its_vocabulary_and_what_ends_an_answer() -> None:
    loaded = load()
    assert loaded.lane == "paged"
    assert [(kv.num_kv_heads, kv.k_dim, kv.v_dim) for kv in loaded.kv_layout] == [(2, 16, 16)] * 2
    assert loaded.bytes_per_token == 2 * 2 * (16 + 16) * 4
    assert loaded.vocab_size == VOCAB_SIZE
    assert set(loaded.eos_token_ids) == {EOS, IM_END}
    assert loaded.max_model_len == 512


def test_a_folder_is_loaded_without_any_network_call(folder: Path, offline: None) -> None:
    loaded = load_model(folder, CPU)
    prompt = random_prompt(9)
    assert paged_greedy(loaded, [prompt], 6) == [greedy_reference(tiny_model(), prompt, 6)]


@pytest.mark.parametrize(("terminal", "quiet"), [(True, True), (False, False), (True, False)])
def test_progress_bars_are_drawn_on_terminals_unless_quiet(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", "")  # known models need no bar
    load_model(str(folder), EngineConfig(device="cpu", quiet=quiet)).release()
    assert ("Loading weights" in capfd.readouterr().err) is (terminal and not quiet)
    assert is_progress_bar_enabled()


def test_the_dtype_is_the_checkpoints_own_unless_one_is_asked_for(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    assert load_model(tmp_path, CPU, tokenizer).dtype is torch.bfloat16
    assert load_model(tmp_path, EngineConfig(device="cpu", dtype="float32"), tokenizer).dtype is torch.float32


def test_strict_mode_computes_in_float32_whatever_the_checkpoint_is(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, EngineConfig(device="cpu", strict=True), byte_tokenizer())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_half_precision_checkpoints_run_in_float32_on_a_cpu(tmp_path: Path) -> None:
    tiny_model().to(torch.float16).save_pretrained(tmp_path)
    assert load_model(tmp_path, CPU, byte_tokenizer()).dtype is torch.float32


# -- what cannot be loaded ----------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path: Path, offline: None) -> None:
    with pytest.raises(ModelError, match="there is no model folder or GGUF file '.*nowhere'"):
        load_model(tmp_path / "nowhere", CPU)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"folder without config\.json"):
        load_model(tmp_path, CPU)


def test_broken_files_are_a_model_error(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ModelError, match="no model could be loaded from the folder"):
        load_model(folder, CPU)


def test_missing_weights_are_an_error_rather_than_random_numbers(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks 9 weights, 'model\.layers\.2"):
        load_model(folder, CPU)


def test_a_loaded_model_needs_its_tokenizer() -> None:
    with pytest.raises(ModelError, match="pass tokenizer="):
        load_model(tiny_model(), CPU)


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513, the model's context is 512"):
        load(config=EngineConfig(device="cpu", max_model_len=513))
    assert load(config=EngineConfig(device="cpu", max_model_len=100)).max_model_len == 100


@pytest.mark.parametrize("device", ["tpu9", "cuda:99"])
def test_an_unknown_or_missing_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}'"):
        load(config=EngineConfig(device=device))


def test_rounded_activations_are_refused_where_no_kernel_rounds_them() -> None:
    with pytest.raises(
        ConfigError, match="activations is 'fp8', which needs a Hopper GPU .*, and the model runs on cpu"
    ):
        load(config=EngineConfig(device="cpu", activations="fp8"))


def test_compact_weights_are_refused_where_nothing_reads_them() -> None:
    with pytest.raises(ConfigError, match=r"compact_weights is True, but there are none on cpu; .* leave"):
        load(config=EngineConfig(device="cpu", compact_weights=True))


def test_an_unknown_quantization_lists_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'int3'; use one of fp8, int8, int4, bnb-4bit, bnb-8bit"):
        load_model(folder, EngineConfig(device="cpu", quantization="int3"))


# -- qualification ------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_share_a_batch_gets_the_serial_lane_and_one_warning() -> None:
    with pytest.warns(UserWarning, match="serial lane") as seen:
        loaded = load("bloom")
    assert len(seen) == 1
    assert loaded.lane == "serial"
    assert loaded.lane_reason == "0 of its 2 layers attend through the attention interface"
    assert loaded.kv_layout == ()


def test_a_model_with_an_unknown_state_beside_its_attention_is_found_out_in_every_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(FAMILIES, "FalconH1Mixer")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.warns(UserWarning, match="serial lane"):
            assert load_model(tiny_model("falcon_h1").to(dtype), CPU, byte_tokenizer()).lane == "serial"


class MeddlingLayer(nn.Module):
    """An attention layer that passes an argument no kernel knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.inner(*arguments, **options, alibi_slopes=torch.ones(4))


def test_an_attention_argument_that_would_be_ignored_is_named() -> None:
    model: Any = tiny_model()
    model.model.layers[1].self_attn = MeddlingLayer(model.model.layers[1].self_attn)
    with pytest.warns(UserWarning, match="passes 'alibi_slopes' to its attention"):
        assert load_model(model, CPU, byte_tokenizer()).lane == "serial"


def test_a_kernel_that_declines_a_layer_sends_the_model_to_the_serial_lane() -> None:
    class Declines(TorchAttention):
        def supports(self, layer: Any) -> str | None:
            return "no softcap here" if layer.softcap is not None else None

    with pytest.warns(UserWarning, match="layer 0: no softcap here"):
        loaded = load_model(tiny_model("gemma2"), CPU, byte_tokenizer(), attention_factory=Declines)
    assert loaded.lane == "serial"


def test_a_kernel_that_answers_wrongly_is_found_out() -> None:
    class Forgets(TorchAttention):
        def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
            return super().forward(*arguments, **options) * 0.9

    with pytest.warns(UserWarning, match="differs from the model's own forward"):
        load_model(tiny_model(), CPU, byte_tokenizer(), attention_factory=Forgets)


def test_a_window_that_only_the_mask_knows_needs_a_context_within_it() -> None:
    hidden = {"use_sliding_window": False, "sliding_window": 100}  # this family then masks, but does not say so
    with pytest.warns(UserWarning, match="its attention window is part of its mask beyond 100 tokens"):
        assert load("smollm3", **hidden).lane == "serial"
    assert load("smollm3", config=EngineConfig(device="cpu", max_model_len=100), **hidden).lane == "paged"


def test_attention_in_chunks_needs_a_context_within_one() -> None:
    chunks = {"attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"]}
    with pytest.warns(UserWarning, match="its attention is cut into chunks beyond 64 tokens"):
        assert load("llama4", **chunks).lane == "serial"
    assert load("llama4", config=EngineConfig(device="cpu", max_model_len=64), **chunks).lane == "paged"


def test_a_rotary_embedding_that_stretches_with_the_batch_needs_a_short_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    with pytest.warns(UserWarning, match="max_model_len=128 keeps it in the paged lane"):
        loaded = load(rope_parameters=rope)
    assert loaded.lane == "serial"
    assert stretched_context(loaded.text_config) == 128
    assert load(config=EngineConfig(device="cpu", max_model_len=128), rope_parameters=rope).lane == "paged"


# -- forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2"])
@pytest.mark.parametrize("chunk", [1000, 7])
def test_greedy_tokens_equal_those_of_generate(kind: str, chunk: int) -> None:
    prompts = [random_prompt(length, seed=length) for length in (30, 5, 17, 64, 1)]
    expected = [greedy_reference(tiny_model(kind), prompt, 12) for prompt in prompts]
    assert paged_greedy(load(kind), prompts, 12, chunk) == expected


def test_logits_come_for_the_wanted_rows_only() -> None:
    loaded = load()
    from graftlm.core.execution.step_plan import ScheduledRow, build_plan
    from graftlm.kernels.wire_plan import Extent
    from tests.stepping import sequence_of

    runner = PagedRunner(loaded, TorchAttention(allocate_kv(loaded.kv_layout, 64, loaded.dtype)))
    first, second = sequence_of(random_prompt(9)), sequence_of(random_prompt(7, seed=1))
    first.kv.own, second.kv.own = [Extent(0, 9)], [Extent(20, 27)]
    rows = [ScheduledRow(first, 9, 0), ScheduledRow(second, 7, 3)]
    logits = runner.forward(build_plan(rows, share_decode=True).wire)
    with torch.inference_mode():
        expected = tiny_model()(torch.tensor([second.tokens.tolist()])).logits[0, -3:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    nothing = runner.forward(build_plan([ScheduledRow(first, 9, 0)], share_decode=True).wire)
    assert nothing.shape == (0, VOCAB_SIZE)


def test_a_model_that_takes_no_logits_to_keep_answers_the_same() -> None:
    class Plain(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.config = inner.config
            self.generation_config = inner.generation_config

        def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: bool = True) -> Any:
            return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    loaded = load_model(Plain(tiny_model()), CPU, byte_tokenizer())
    assert loaded.lane == "paged"
    prompt = random_prompt(11)
    assert paged_greedy(loaded, [prompt], 5) == [greedy_reference(tiny_model(), prompt, 5)]


def test_a_model_that_was_handed_over_can_still_generate() -> None:
    model, prompt = tiny_model(), random_prompt(8)
    loaded = load_model(model, CPU, byte_tokenizer())
    expected = greedy_reference(tiny_model(), prompt, 6)
    assert greedy_reference(model, prompt, 6) == expected
    assert paged_greedy(loaded, [prompt], 6) == [expected]
    assert greedy_reference(model, prompt, 6) == expected


def test_release_gives_the_model_back_as_it_came() -> None:
    model, twin = tiny_model(), tiny_model()
    loaded = load_model(model, CPU, byte_tokenizer())
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    loaded.release()
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    assert model.state_dict().keys() == twin.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in twin.state_dict().items())


def test_weights_are_not_held_twice() -> None:
    loaded = load()
    linears = [m for m in loaded.model.modules() if isinstance(m, PackedLinear)]
    assert linears
    assert all(m._original[0].weight.numel() == 0 for m in linears)


def test_loading_emits_no_warning_for_a_model_that_qualifies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load("qwen3").lane == "paged"
