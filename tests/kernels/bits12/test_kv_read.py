"""Attention over a compact store against its definition; without a GPU, in Triton's interpreter, in float32."""

import pytest
import torch
import triton
import triton.language as tl

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_codec import DIMS, pack, unpack, words_of
from graftlm.kernels.bits12.kv_read import SCALE, power_of, read_vectors
from graftlm.kernels.gpu.attention.decode import DecodeRows, Workspace
from graftlm.kernels.gpu.attention.extend import CompactRows, ExtendRows, ExtendTile, extend_attention
from graftlm.kernels.gpu.attention.shared_prefix import PrefixRows, decode_prefix
from tests.kernels.compiling import run_compiler
from tests.kernels.gpu.attention.test_attention import DEVICE, error, reference, scores_of

ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter has no products in bfloat16
TOLERANCE = 1e-2 if ON_GPU else 2e-5
NUM_SLOTS = 200


@triton.jit
def _read_all(records, exponents, out, N: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    n = tl.arange(0, N)
    found = read_vectors(records + n * (D // 2 * 3), power_of(tl.load(exponents + n).to(tl.int32)), N, D, ASM)
    tl.store(out + n[:, None] * D + tl.arange(0, D)[None, :], found)


def read(x: torch.Tensor) -> torch.Tensor:
    """What is read of x [N, dim], packed."""
    words, exponents = pack(x)
    out = torch.full(x.shape, float("nan"), dtype=DTYPE, device=DEVICE)
    _read_all[(1,)](words.view(torch.uint8), exponents, out, *x.shape, ON_GPU)
    return out.double() * SCALE.value


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [2.0**-34, 1.0, 2.0**66])
def test_numbers_are_read_as_they_were_packed(size: float, dim: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(32, dim, device=DEVICE) * torch.logspace(-3, 3, 32, device=DEVICE)[:, None] * size).bfloat16()
    x[:, ::5] *= 2.0**-12  # below what keeps all its bits
    assert torch.equal(read(x), unpack(*pack(x)).double())


def test_any_bytes_are_finite_numbers() -> None:
    words = torch.randint(-(2**31), 2**31, (32, 48), dtype=torch.int64, device=DEVICE).int()
    exponents = torch.arange(224, 256, device=DEVICE).to(torch.uint8)
    out = torch.full((32, 128), float("nan"), dtype=DTYPE, device=DEVICE)
    _read_all[(1,)](words.view(torch.uint8), exponents, out, 32, 128, ON_GPU)
    assert out.isfinite().all()


class Store:
    """A compact store of random bytes, in which sequences that share no slots are written as far as they are cached."""

    def __init__(self, cached: list[int], kv_heads: int, dim: int = 128) -> None:
        torch.manual_seed(0)
        self.k, self.v = (
            torch.randint(-(2**31), 2**31, (NUM_SLOTS, kv_heads, words_of(dim)), device=DEVICE).int() for _ in range(2)
        )
        self.exponents = torch.randint(0, 256, (kv_heads, NUM_SLOTS, 2), device=DEVICE).to(torch.uint8)
        self.table = torch.full((len(cached) + 1, max(cached) + 80), NUM_SLOTS - 1, dtype=torch.int32, device=DEVICE)
        self.rows = ints(list(range(len(cached), 0, -1)))  # not in batch order
        slots = torch.randperm(NUM_SLOTS, device=DEVICE).split([*cached, NUM_SLOTS - sum(cached)])
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, own in zip(self.rows.tolist(), slots, strict=False):
            self.table[row, : len(own)] = own.int()
            k, v = (numbers(len(own), kv_heads, dim) for _ in range(2))
            self.k[own], k_exponents = pack(k)
            self.v[own], v_exponents = pack(v)
            self.exponents[:, own] = torch.stack([k_exponents, v_exponents], -1).transpose(0, 1)
            self.kept.append((unpack(*pack(k)), unpack(*pack(v))))


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def numbers(count: int, heads: int, dim: int) -> torch.Tensor:
    """Vectors of unlike sizes, bfloat16 [count, heads, dim]."""
    sizes = torch.exp2(torch.randint(-3, 2, (count, heads, 1), device=DEVICE).float())
    return (torch.randn(count, heads, dim, device=DEVICE) * sizes).bfloat16()


HEADS = [(4, 4), (8, 2), (8, 1)]
VARIANTS = [{}, {"window": 7}, {"window": 40}, {"softcap": 2.0}, {"sinks": True},
            {"window": 40, "softcap": 2.0, "sinks": True}]  # fmt: skip
LENGTHS = [([0, 5, 70], [5, 1, 67]), ([31, 32, 33], [1, 32, 33]), ([64, 0, 1], [3, 64, 65])]
TILE = None if ON_GPU else ExtendTile(32, 32, 4, 2)
GRID = [(h, v, n, 128) for h in HEADS for v in VARIANTS for n in LENGTHS]
GRID += [(HEADS[1], v, n, dim) for v in VARIANTS for n in LENGTHS for dim in (64, 256)]
if not ON_GPU:
    GRID = [(HEADS[1], v, LENGTHS[0], 128) for v in VARIANTS] + [(h, {}, n, 128) for h in HEADS for n in LENGTHS[1:]]
    GRID += [(HEADS[1], VARIANTS[2], LENGTHS[0], dim) for dim in (64, 256)]


@pytest.mark.parametrize(("heads", "variant", "lengths", "dim"), GRID)
def test_extend_reads_cached_tokens_from_the_store_and_new_ones_from_the_step(heads, variant, lengths, dim) -> None:
    (num_heads, kv_heads), (cached, new) = heads, lengths
    store = Store(cached, kv_heads, dim)
    num_tokens, starts = sum(new), [0, new[0], new[0] + new[1], sum(new)]
    packed = torch.randn(num_tokens + 1, num_heads + 2 * kv_heads, dim, device=DEVICE).to(DTYPE)
    q, k, v = packed[1:].split([num_heads, kv_heads, kv_heads], 1)  # strided, as in a step
    options = {"scale": 0.1, "window": variant.get("window"), "softcap": variant.get("softcap")}
    options["sinks"] = torch.randn(num_heads, device=DEVICE) if variant.get("sinks") else None
    step = ExtendRows(
        store.table,
        store.rows,
        ints([c + n for c, n in zip(cached, new, strict=True)]),
        ints(starts),
        max(new),
    )
    out = torch.full((num_tokens, num_heads, dim), float("nan"), dtype=DTYPE, device=DEVICE)
    rows = CompactRows(store.exponents, k, v)
    params = AttentionParams(**options)
    assert extend_attention(q, store.k, store.v, step, params, compact=rows, tile=TILE, out=out) is out
    for i, (k_kept, v_kept) in enumerate(store.kept):
        here = slice(starts[i], starts[i + 1])
        keys, values = torch.cat([k_kept, k[here].float()]), torch.cat([v_kept, v[here].float()])
        positions = torch.arange(cached[i], cached[i] + new[i], device=DEVICE)
        assert error(out[here], reference(q[here], keys, values, positions, **options)) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "length", "splits", "softcap", "dim"),
    [
        ((4, 4), 64, 2, None, 128),
        ((8, 2), 80, 2, None, 128),
        ((8, 2), 65, 1, 2.0, 256),
        ((8, 1), 3, 2, None, 64),
        ((8, 1), 130, 1, None, 128),
    ],
)
def test_a_shared_prefix_leaves_its_parts_and_their_weights(heads, length, splits, softcap, dim) -> None:
    num_heads, kv_heads = heads
    store = Store([length, 20], kv_heads, dim)
    members, num_parts = [0, 2, 3], splits + 1
    q = torch.randn(4, num_heads, dim, device=DEVICE).to(DTYPE)
    workspace = Workspace.allocate(4, num_heads, dim, num_parts, DEVICE)
    workspace.out.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    table_rows = store.rows[[0, 1, 0, 0]]
    step = DecodeRows(store.table, table_rows, ints([length] * 4), ints([length, 0, length, length]))
    prefix = PrefixRows(ints([length]), ints([*members, 99]), ints([3]))
    decode_prefix(
        q, store.k, store.v, step, prefix, workspace, AttentionParams(0.1, softcap=softcap),
        splits=splits, num_parts=num_parts, exponents=store.exponents,
    )  # fmt: skip
    lse = workspace.lse.view(4, num_heads, num_parts)
    parts = workspace.out.view(4, num_heads, num_parts, dim)
    assert lse[1].isnan().all()  # no member
    assert parts[:, :, splits:].isnan().all()  # of other kernels
    weights = torch.exp2(lse[members, :, :splits].double())
    found = (parts[members, :, :splits].double().nan_to_num() * weights[..., None]).sum(2) / weights.sum(2)[..., None]
    keys, values = store.kept[0]
    last = torch.full((3,), length - 1, device=DEVICE)
    assert error(found, reference(q[members], keys, values, last, scale=0.1, softcap=softcap)) < TOLERANCE
    scores = scores_of(q[members], keys, 0.1, softcap)
    expected = scores.logsumexp(-1).T / torch.log(torch.tensor(2.0))
    assert torch.allclose(weights.sum(2).log2(), expected.double(), atol=3e-2 if ON_GPU else 1e-4)


_COMPILE = """
import subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from graftlm.kernels.gpu.attention.extend import LARGE_COMPACT, _extend, tile_of
import torch

window, num_queries, dim, cached = sys.argv[1] == "True", int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
tile = tile_of(torch.bfloat16, dim, num_queries, unpacking_rows=8 * cached)
if dim > 128 and num_queries > tile.queries:
    tile = LARGE_COMPACT
given = dict(GROUP=4, D=dim, D_PAD=dim, E=dim, E_PAD=dim, M=tile.queries, N=tile.block, WINDOW=window, SOFTCAP=False,
             SINKS=False, SCALED=False, PRECISION="tf32", COMPACT=True, CACHED=cached, ASM=True, UNTIL=False)
types = dict.fromkeys(["q", "k_new", "v_new", "sinks", "out"], "*bf16") | dict.fromkeys(["k", "v"], "*u8")
types |= dict.fromkeys(["table", "rows", "lens", "indptr"], "*i32") | dict.fromkeys(["k_scale", "v_scale"], "*fp32")
types |= {"until": "*i32", "exponents": "*i16", "scale": "fp32", "softcap": "fp32"}
signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in _extend.arg_names}
aligned = [n for n, t in signature.items() if t[0] == "*" or t == "i32" and n not in ("window", "exponents_head")]
found = triton.compile(
    ASTSource(_extend, signature, {(_extend.arg_names.index(n),): v for n, v in given.items()},
              {(_extend.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}),
    target=GPUTarget("cuda", 90, 32), options=dict(num_warps=tile.warps, num_stages=tile.stages))
with tempfile.TemporaryDirectory() as folder:
    with open(folder + "/a.ptx", "w") as file:
        file.write(found.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", folder + "/a.ptx", "-o", folder + "/a"]
    run = subprocess.run(command, capture_output=True, text=True)
    said = run.stderr + run.stdout
    assert run.returncode == 0, said
print(found.metadata.shared, found.asm["ptx"].count("mul.rn.bf16x2"), int("serialized" in said))
"""


@pytest.mark.parametrize(
    ("window", "num_queries", "dim", "cached"),
    [
        (False, 256, 128, True),
        (False, 4096, 128, True),
        (True, 256, 128, True),
        (True, 64, 256, True),
        (False, 256, 256, True),
        (True, 256, 256, False),
        (False, 256, 64, True),
    ],
)
def test_on_hopper_products_follow_each_other_without_a_pause(
    window: bool, num_queries: int, dim: int, cached: bool
) -> None:
    shared, factors, serialized = map(int, run_compiler(_COMPILE, window, num_queries, dim, cached))
    assert shared <= 227 * 1024
    assert factors > 0 or not cached
    assert not serialized
