"""The network that is trained: transformers' Llama, over documents laid end to end.

Same arithmetic and parameter names as `LlamaForCausalLM`, so `state_dict` is what transformers
loads; the only difference is the input: one row of tokens in which each document attends to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Shape:
    """The model's size; `context` is in tokens."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 768
    num_layers: int = 8
    num_heads: int = 6
    context: int = 4096
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def config(self, eos_token_id: int, pad_token_id: int) -> Any:
        """Return the same shape as a `LlamaConfig`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            rms_norm_eps=self.norm_eps,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
        )


# (q, k, v [num_tokens, num_heads, head_dim], starts int32 [max_documents + 1], longest) -> o, as q
AttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Return the definition: causal within each document. Memory grows with num_tokens squared."""
    place = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(starts, place, right=True)
    mask = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """FlashAttention over ragged documents, by torch's public function."""
    from torch.nn.attention.varlen import varlen_attn

    try:
        out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
    except TypeError:  # torch before 2.12 says it with a flag
        out = varlen_attn(q, k, v, starts, starts, longest, longest, is_causal=True)  # type: ignore[call-arg]
    return out[0] if isinstance(out, tuple) else out


def flash_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Return the same by the operator below it."""
    out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False)[
        0
    ]
    return out


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.num_heads, self.head_dim, self.longest = shape.num_heads, shape.head_dim, shape.context
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.attend: AttentionFn = masked_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
        joined = linear_of(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.view(-1, self.num_heads, self.head_dim) for y in joined)
        q, k = (rotate(y, cos, sin).to(v.dtype) for y in (q, k))
        out: Tensor = self.o_proj(self.attend(q, k, v, starts, self.longest).flatten(1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear_of(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


def linear_of(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Compute several layers of one input as one matmul: `x` is read once, forward and backward."""
    return F.linear(x, torch.cat([layer.weight for layer in layers])).chunk(len(layers), -1)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, starts)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    """tokens int64 [num_tokens], positions int64 [num_tokens], starts int32 -> loss.

    `weights` float [num_tokens] weighs the prediction *of* each token; a document's first is never
    predicted. Returns (weighted mean loss, summed loss and count over fully weighted tokens).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.stream = torch.float32  # what the layers add up in
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), inverse)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def initialize(self, seed: int) -> None:
        """Normal weights; layers start as the identity (their last matrices are zero)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.0 if last else 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def use(self, attend: AttentionFn, stream: torch.dtype = torch.float32) -> None:
        self.stream = stream
        for attention in self.modules():
            if isinstance(attention, Attention):
                attention.attend = attend

    def hidden(self, tokens: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        x: Tensor = lookup(self.embed_tokens.weight, tokens).to(self.stream)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos, sin, starts)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor, positions: Tensor, starts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(self.hidden(tokens, positions, starts)[:-1], self.embed_tokens.weight)
        # cross entropy without a scatter, which has no fixed order of sums on a GPU
        logits, wanted = logits.float(), tokens[1:, None]
        chosen = torch.where(torch.arange(logits.shape[1], device=logits.device) == wanted, logits, 0.0).sum(-1)
        loss = logits.logsumexp(-1) - chosen
        weight = weights[1:] * (positions[1:] > 0)
        full = (weight >= 0.5).float()
        return (loss * weight).sum() / weight.sum(), torch.stack(((loss * full).sum(), full.sum())).detach()


class Lookup(torch.autograd.Function):
    """Rows of a table whose gradient is a product with one-hot rows: its sums have a fixed order, which adding
    row by row on a GPU has not.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows = table.shape[0]
        return table[tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        grad = grad.bfloat16() if grad.is_cuda else grad
        one_hot = (torch.arange(ctx.num_rows, device=grad.device)[:, None] == tokens).to(grad.dtype)
        return (one_hot @ grad).float(), None


lookup: Callable[[Tensor, Tensor], Tensor] = Lookup.apply


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def choose_attention(device: torch.device) -> AttentionFn:
    """Return the fastest attention that agrees with the definition here, forward and backward; tried in seconds."""
    if device.type != "cuda":
        return masked_attention
    starts = torch.tensor([0, 5, 300, 301, 700, 700, 700], dtype=torch.int32, device=device)
    inputs = [torch.randn(700, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = _outputs(masked_attention, inputs, starts)
    problems = []
    for attend in (flash_attention, varlen_attention):
        try:
            found = _outputs(attend, inputs, starts)
        except Exception as error:
            problems.append(f"{attend.__name__}: {error}")
            continue
        worst = max(float((f - w).float().norm() / w.float().norm()) for f, w in zip(found, wanted, strict=True))
        if worst < 2e-2:
            print(f"attention: {attend.__name__}, relative error {worst:.1e}", flush=True)
            return attend
        problems.append(f"{attend.__name__}: relative error {worst:.1e}")
    raise RuntimeError("no ragged attention works here: " + "; ".join(problems))


def _outputs(attend: AttentionFn, inputs: list[Tensor], starts: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, v = leaves
    out = attend(q, k, v, starts, 4096)
    out.float().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
