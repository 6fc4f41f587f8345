"""Decode attention over KV in 12 bits a number. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_codec import DIMS, pack, unpack
from graftlm.kernels.hopper.support import gluon_kernel
from tests.kernels.compiling import run_compiler
from tests.kernels.gluon import error

LENGTHS = [1, 15, 16, 17, 32, 33, 700, 1499]


class Case:
    """Rows of these lengths over KV whose tokens lie anywhere, some of them large, small or zero."""

    def __init__(self, num_kv_heads: int, group: int, lengths: list[int] = LENGTHS, *, dim: int = 128) -> None:
        num_slots, num_rows = 1600, len(lengths)
        self.num_kv_heads, self.group, self.lengths, self.dim = num_kv_heads, group, lengths, dim
        kv = torch.randn(2, num_slots, num_kv_heads, dim, device="cuda").bfloat16()
        kv[0, ::7] *= 30
        kv[1, 5::11] *= 1e-3
        kv[:, 3] = 0
        kv[:, :, 0, 3] *= 100
        words, exponents = pack(kv)
        self.words = torch.cat(list(words), -1)
        self.exponents = exponents.permute(2, 1, 0).contiguous()
        self.kept = unpack(words, exponents).double()
        self.q = torch.randn(num_rows, num_kv_heads * group, dim, device="cuda").bfloat16()
        self.table = torch.stack([torch.randperm(num_slots)[: max(LENGTHS)] for _ in range(num_rows)]).int().cuda()
        self.rows = torch.randperm(num_rows).int().cuda()

    def attend(self, splits: int, **options: Any) -> torch.Tensor:
        from graftlm.kernels.gpu.attention.decode import DecodeRows, Workspace

        kernel = gluon_kernel("bits12.decode")
        assert kernel is not None
        num_rows, num_heads, _ = self.q.shape
        lens = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        workspace = Workspace.allocate(num_rows, num_heads, self.dim, splits, self.q.device)
        workspace.out.fill_(float("nan"))
        out = torch.full_like(self.q, float("nan"))
        found = kernel.compact_decode_attention(
            self.q,
            self.words,
            self.exponents,
            DecodeRows(self.table, self.rows, lens, torch.zeros_like(lens)),
            workspace,
            AttentionParams(0.1, **options),
            splits=splits,
            out=out,
        )
        assert found is out
        assert not workspace.counters.any()
        return out

    def expected(
        self, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float64, over what the store keeps."""
        found = []
        for q, row, length in zip(self.q.double(), self.rows.tolist(), self.lengths, strict=True):
            seen = self.table[row, max(length - (window or length), 0) : length].long()
            keys, values = self.kept[:, seen]
            scores = torch.einsum("hgd,nhd->hgn", q.view(self.num_kv_heads, self.group, self.dim), keys) * 0.1
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(self.num_kv_heads, self.group, 1)], -1)
            weights = scores.softmax(-1)[..., : len(seen)]
            found.append(torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1))
        return torch.stack(found)


of_each_size = pytest.mark.parametrize("dim", DIMS)


@pytest.mark.gpu
@of_each_size
@pytest.mark.parametrize("splits", [1, 2, 5, 32])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(8, 4), (2, 1), (3, 7), (1, 8)])
def test_every_row_attends_to_what_the_store_keeps(num_kv_heads: int, group: int, splits: int, dim: int) -> None:
    case = Case(num_kv_heads, group, dim=dim)
    found, expected = case.attend(splits), case.expected()
    for row in range(len(LENGTHS)):
        assert error(found[row], expected[row]) < 1e-2, f"a row of {LENGTHS[row]} tokens"


@pytest.mark.gpu
@of_each_size
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_softcaps_and_sinks(
    window: int | None, softcap: float | None, with_sinks: bool, splits: int, dim: int
) -> None:
    case = Case(2, 4, dim=dim)
    sinks = torch.randn(8, device="cuda").bfloat16() if with_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    assert error(case.attend(splits, **options), case.expected(**options)) < 1e-2


@pytest.mark.gpu
@of_each_size
def test_rows_that_share_a_prefix_join_what_was_found_for_it(dim: int) -> None:
    from graftlm.kernels.gpu.attention.decode import DecodeRows, Workspace
    from graftlm.kernels.gpu.attention.shared_prefix import PrefixRows, decode_prefix

    kernel = gluon_kernel("bits12.decode")
    assert kernel is not None
    case, shared, splits, prefix_splits = Case(2, 4, [300, 301, 333, 999, 40], dim=dim), 280, 3, 4
    members = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
    case.table[case.rows[:4].long(), :shared] = case.table[int(case.rows[0]), :shared].clone()
    lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    starts = torch.tensor([shared] * 4 + [0], dtype=torch.int32, device="cuda")
    rows = DecodeRows(case.table, case.rows, lens, starts)
    length, count = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (shared, 4))
    workspace = Workspace.allocate(5, 8, dim, splits + prefix_splits, case.q.device)
    workspace.out.fill_(float("nan"))
    k, v = case.words.chunk(2, -1)
    decode_prefix(
        case.q,
        k,
        v,
        rows,
        PrefixRows(length, members, count),
        workspace,
        AttentionParams(0.1),
        splits=prefix_splits,
        num_parts=splits + prefix_splits,
        exponents=case.exponents,
    )
    found = kernel.compact_decode_attention(
        case.q,
        case.words,
        case.exponents,
        rows,
        workspace,
        AttentionParams(0.1),
        splits=splits,
        num_prefix=prefix_splits,
    )
    assert error(found, case.expected()) < 1e-2


@pytest.mark.gpu
def test_a_row_of_no_tokens_gives_zeros() -> None:
    case = Case(2, 4, [0, 20, 0])
    for splits in (1, 4):
        found = case.attend(splits)
        assert not found[0].any()
        assert not found[2].any()
        assert found[1].isfinite().all()


@pytest.mark.gpu
@of_each_size
def test_what_is_no_number_does_not_become_one(dim: int) -> None:
    case = Case(1, 4, [20, 20], dim=dim)
    slot = int(case.table[int(case.rows[1]), 7])
    for part in (0, 1):
        before = case.exponents[0, slot, part].clone()
        case.exponents[0, slot, part] = 255
        found = case.attend(1)
        assert found[0].isfinite().all()
        assert found[1].isnan().all()
        case.exponents[0, slot, part] = before


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from graftlm.kernels.bits12.decode import _decode, num_registers, tokens_of

types = dict(q="*bf16", records="*i32", exponents="*i16", table="*i32", rows="*i32", lens="*i32", starts="*i32")
types |= dict(items="*i32", counts="*i32")
types |= dict(part_out="*fp32", part_lse="*fp32", counters="*i32", sinks="*bf16", out="*bf16")
types |= dict(scale="fp32", softcap="fp32")
given = dict(GROUP=4, D={dim}, T=tokens_of({dim}), STAGES={stages})
given |= dict(WIDE=False, SPLIT={split}, WINDOW={split}, SOFTCAP={split}, SINKS={split})
given |= dict(PDL=True)
signature = {{name: types.get(name, "constexpr" if name in given else "i32") for name in _decode.arg_names}}
constants = {{(_decode.arg_names.index(name),): value for name, value in given.items()}}
whole = [(i,) for i, name in enumerate(_decode.arg_names) if name in types and types[name][0] == "*"]
whole += [(_decode.arg_names.index(name),) for name in ("slot_words", "head_words", "out_row", "q_row")]
source = GluonASTSource(_decode, signature, constants, {{i: [["tt.divisibility", 16]] for i in whole}})
options = dict(num_warps=1, maxnreg=num_registers({dim}))
found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = found.asm["ptx"]
print(found.metadata.shared, ptx.count("mma.sync"), ptx.count("cp.async.cg"), ptx.count("ld.local"))
"""


@pytest.mark.parametrize(
    ("stages", "split", "dim"), [(2, False, 128), (3, True, 128), (8, True, 128), (2, True, 256), (4, False, 64)]
)
def test_the_kernel_compiles_for_hopper(stages: int, split: bool, dim: int) -> None:
    if gluon_kernel("bits12.decode") is None:
        pytest.skip("this Triton has no Gluon")
    program = _COMPILE.format(stages=stages, split=split, dim=dim)
    shared, products, copies, spilled = map(int, run_compiler(program)[-4:])
    block = 12288 if dim == 256 else 6144
    assert stages * block <= shared <= stages * block + 128  # blocks, and slots on their way between threads
    assert products == block * 16 // 6144  # half of them of keys, half of values
    assert copies >= block * 12 // 6144 * stages  # of 16 bytes a thread
    assert spilled == 0


@pytest.mark.parametrize(("head_dim", "most"), [(128, 11), (256, 9)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
def test_all_programs_of_a_multiprocessor_run_at_once_if_they_fit(num_kv_heads: int, head_dim: int, most: int) -> None:
    kernel = gluon_kernel("bits12.decode")
    if kernel is None:
        pytest.skip("this Triton has no Gluon")
    shared, num_sms = 228 * 1024, 132
    at_most = min(65536 // 32 // kernel.num_registers(head_dim), 16)  # at once
    for num_rows in range(1, 513):
        splits = kernel.num_splits(num_rows, num_kv_heads, num_sms, head_dim)
        at_once = -(-num_rows * num_kv_heads * splits // num_sms)
        stages = kernel.num_stages(num_rows * num_kv_heads * splits / num_sms, head_dim)
        assert 1 <= splits <= 16
        assert splits == 1 or at_once <= most
        assert min(at_once, at_most) * (stages * 48 * head_dim + 64 + 1024) <= shared
