"""Packed linear layers on CPUs in place of a model's own, each compared with its original, all reversible.

cpu_layers.py fuses whole layers on top of these; gpu_modules.py is for GPUs.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.fusion.layer_parts import allclose
from graftlm.kernels.cpu.calls import INT8_ROWS
from graftlm.kernels.cpu.linear.packed_codes import PackedCodes, PackedRows
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear, packable
from graftlm.kernels.cpu.linear.packed_pieces import PackedPieces, outputs_of_piece
from graftlm.kernels.cpu.linear.quantised_panels import Activations, QuantisedPanels, arithmetic_of, pack, problem
from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear
from graftlm.kernels.cpu.mapped_files import MappedFiles
from graftlm.kernels.quantised_modules import QuantisedEmbedding, QuantisedLinear
from graftlm.kernels.quantised_weight import QuantisedWeight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error between a module and its replacement on random input."""

_PROBED_OUTPUTS = 128
"""Outputs of a quantised weight whose values are computed for a comparison."""


@dataclass
class Fusions:
    """The replacements in a model. `undo` restores the original modules.

    num_fused    decoder layers that run as a few kernels
    num_around   those among them that leave attention to the model's own code, up to its last projection
    num_compact  linear layers that read their weight in 12 bits in steps of few tokens
    reasons      reasons for code that was not replaced, by the name of its class or operation
    unfused      reasons why decoder layers keep their own forward: on a GPU by layer, on a CPU with the layers' indices
    trusted      whether an earlier load of the same files passed all comparisons with the model's own modules
    num_refused  replacements that differed from their originals
    """

    num_packed: int = 0
    num_compact: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    num_fused: int = 0
    num_around: int = 0
    unfused: list[str] = field(default_factory=list)
    trusted: bool = False
    num_refused: int = 0
    _undo: list[tuple[Callable[[], None], bool]] = field(default_factory=list, repr=False)

    def add(self, undo: Callable[[], None], *, weights: bool = False) -> None:
        """Note how to undo a replacement.

        weights  whether it only lays out weights as they were, which takes as long as packing them
        """
        self._undo.append((undo, weights))

    def passes(self, same: Callable[[], bool]) -> bool:
        """Return True if a replacement equals its original, by the comparison `same` or by that of an earlier load."""
        passed = self.trusted or same()
        self.num_refused += not passed
        return passed

    def undo(self, *, weights: bool = True) -> None:
        """Restore the model's own modules, last replaced first, and its weights unless `weights` is False."""
        while self._undo:
            undo, only_weights = self._undo.pop()
            if weights or not only_weights:
                undo()


def fuse(model: nn.Module, *, unchanged: bool = False, fusions: Fusions | None = None) -> Fusions:
    """Replace the linear layers of `model` on a CPU by packed ones with equal outputs.

    One weight at a time is in memory twice; if `unchanged`, only a piece of the head.
    unchanged  whether no other code holds the weights, and their values are those of the files
    fusions  earlier replacements, to which these are added
    """
    fusions = Fusions() if fusions is None else fusions
    with torch.inference_mode(False), torch.no_grad():
        _pack_linears(model, fusions, MappedFiles() if unchanged else None)
    return fusions


@torch.no_grad()
def pack_quantised(model: nn.Module, fusions: Fusions, activations: Activations) -> None:
    """Replace the modules with quantised weights on a CPU by modules whose codes are in panels, one at a time.

    The model then runs by its own forward too: before, each call of a module would compute its dense weight.
    """
    if importlib.util.find_spec("llvmlite") is None:
        return  # fuse_cpu warns of it
    kinds = (QuantisedLinear, QuantisedEmbedding)
    held: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    users = Counter(id(module.quantised) for module in held)
    shared: dict[int, tuple[QuantisedWeight, QuantisedPanels]] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, QuantisedLinear | QuantisedEmbedding):
                continue
            weight = child.quantised
            if not isinstance(weight, QuantisedWeight) or child._forward_hooks:
                continue
            reason = problem(weight)
            if reason is None and isinstance(child, QuantisedEmbedding) and weight.order is not None:
                reason = "an embedding with inputs in another order"
            if reason is not None:
                fusions.reasons[f"{type(child).__name__} in its own format"] = reason
                continue
            panels = (
                shared[id(weight)][1]
                if id(weight) in shared
                else pack(weight, None, arithmetic_of(weight, activations))
            )
            if not fusions.passes(partial(_multiplies, panels, weight)):
                fusions.reasons["a quantised weight in its own format"] = "the loop's output differs"
                continue
            if users[id(weight)] > 1:
                shared[id(weight)] = weight, panels
            packed: PackedCodes | PackedRows
            packed = PackedRows(child, panels) if isinstance(child, QuantisedEmbedding) else PackedCodes(child, panels)
            child.quantised = None
            fusions.num_packed += 1
            setattr(parent, name, packed)
            fusions.add(partial(_restore, parent, name, packed), weights=True)


def _restore(parent: nn.Module, name: str, packed: PackedCodes | PackedRows) -> None:
    setattr(parent, name, packed.unpack())


def _multiplies(panels: QuantisedPanels, weight: QuantisedWeight) -> bool:
    """Return True if the loop computes the first outputs of a weight as torch does with its values."""
    x = torch.randn(3, panels.num_in, dtype=torch.float32).to(panels.dtype)
    num_out = min(panels.num_out, _PROBED_OUTPUTS)
    expected = nn.functional.linear(x, weight.dense(slice(0, num_out)))
    ordered = x if panels.order is None else x.index_select(1, panels.order)
    tolerance = TOLERANCE[torch.bfloat16 if panels.forms & INT8_ROWS else panels.dtype]
    return allclose(expected, SkinnyLinear([panels], None, panels.dtype)(ordered)[:, :num_out], tolerance)


def _pack_linears(model: nn.Module, fusions: Fusions, files: MappedFiles | None) -> None:
    shared = _shared_storages(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    replaced: dict[int, PackedLinear | PackedPieces] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not packable(child):
                continue
            packed = replaced.get(id(child))
            if packed is None:
                weight = child.get_parameter("weight")
                in_place = weight.data_ptr() in shared
                if files is not None and child is head and not in_place and len(weight) > outputs_of_piece(weight):
                    packed = PackedPieces.of(child, partial(_pack, fusions=fusions, in_place=False))
                else:
                    packed = _pack(child, fusions, in_place=in_place)
                if packed is None:
                    continue
                replaced[id(child)] = packed
                if files is not None and not in_place:
                    files.release(weight)
                fusions.num_packed += 1
            setattr(parent, name, packed)
            fusions.add(_restorer(parent, name, packed), weights=True)
            packed.release_original()


def _pack(linear: nn.Module, fusions: Fusions, *, in_place: bool) -> PackedLinear | None:
    """Return `linear` with a packed weight; None if oneDNN refuses it or its output differs."""
    dtype = linear.get_parameter("weight").dtype
    if in_place and dtype is not torch.float32:
        return None  # oneDNN gains nothing without its own layout
    try:
        packed = PackedLinear(linear, in_place=in_place)
        return packed if fusions.passes(partial(_equal, linear, packed, TOLERANCE[dtype])) else None
    except RuntimeError:  # oneDNN refuses this dtype or shape on this CPU
        return None


def _equal(linear: nn.Module, packed: PackedLinear, tolerance: float) -> bool:
    probe = torch.randn(3, packed.in_features, dtype=torch.float32).to(packed.dtype)
    return allclose(linear(probe), packed(probe), tolerance)


def _restorer(parent: nn.Module, name: str, packed: PackedLinear | PackedPieces) -> Callable[[], None]:
    return lambda: setattr(parent, name, packed.unpack())


def _shared_storages(model: nn.Module) -> set[int]:
    """Return the addresses of weights that several modules share."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            seen[parameter.data_ptr()] = seen.get(parameter.data_ptr(), 0) + 1
    return {address for address, count in seen.items() if count > 1}
