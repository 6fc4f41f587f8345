"""The weight of a linear layer in any format, and the registry of the modules that hold one.

A format is a class with the protocol `Weight`, registered under the class of the modules that hold it (a quantizer's
modules, for example). Fusions find weights by `weight_of(module)`, concatenate and split them; kernels read the fields
of the formats they know. All of this runs when a model is loaded, once a layer; no step calls it except `dense` of
formats that no kernel multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

ALL = slice(None)
"""All outputs of a weight."""


class Weight(Protocol):
    """The weight [n, k] of a linear layer: n outputs of k inputs."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values of `dense`, and of the rows that the weight multiplies."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory: codes, scales and lists included."""
        ...

    @property
    def fallback(self) -> Weight | None:
        """Return a form of this weight that more kernels support; None without one, or if it takes more memory."""
        ...

    def dense(self, rows: slice = ALL) -> torch.Tensor:
        """Return the values of some outputs, [num_rows, k]: a view of a plain weight, a copy of any other."""
        ...

    def concat(self, others: Sequence[Weight]) -> Weight:
        """Return one weight with the outputs of this one, then of `others`.

        Raises ValueError if they differ in format, dtype, inputs or order of inputs.
        """
        ...

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        """Return the weights of `sizes` outputs each, the inverse of `concat`; they share memory with this one."""
        ...

    def shard(self, axis: int, rank: int, size: int) -> Weight:
        """Return part `rank` of `size` equal parts of the outputs (axis 0) or inputs (axis 1), in memory of its own.

        Raises ValueError if the axis is no multiple of `size`, in units of the format (a group of a scale).
        """
        ...


@dataclass(frozen=True, eq=False)
class PlainWeight:
    """A weight as a tensor.

    values  [n, k]
    """

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes

    @property
    def fallback(self) -> Weight | None:
        return None

    def dense(self, rows: slice = ALL) -> torch.Tensor:
        return self.values if rows == ALL else self.values[rows]

    def concat(self, others: Sequence[Weight]) -> Self:
        tensors = [self.values, *(x.values for x in others if type(x) is type(self))]
        if len(tensors) <= len(others) or any(x.shape[1] != self.shape[1] or x.dtype != self.dtype for x in tensors):
            raise ValueError(f"a weight {self.shape} in {self.dtype} has no concatenation with {others}")
        return replace(self, values=torch.cat(tensors))

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        return [replace(self, values=values) for values in self.values.split(list(sizes))]

    def shard(self, axis: int, rank: int, size: int) -> Self:
        length = self.values.shape[axis]
        if length % size:
            raise ValueError(f"axis {axis} of a weight {self.shape} has {length} entries, no multiple of {size} ranks")
        part = length // size
        return replace(self, values=self.values.narrow(axis, rank * part, part).contiguous())


class WeightFormat(NamedTuple):
    """The access to the weight of a class of modules, whose attribute `bias` is a tensor [n] or None.

    of   module -> its weight
    put  gives a module a weight; None frees the memory of the one it has
    """

    of: Callable[[Any], Weight]
    put: Callable[[Any, Weight | None], None]


_FORMATS: dict[type[nn.Module], WeightFormat] = {}


def register_format(module_class: type[nn.Module], weight_format: WeightFormat) -> None:
    """Let `weight_of` find the weights of modules of this class, not of its subclasses: their forward may differ."""
    _FORMATS[module_class] = weight_format


def weight_of(module: nn.Module | None) -> Weight | None:
    """Return the weight of a linear layer; None for modules of classes without a registered format."""
    found = _FORMATS.get(type(module)) if module is not None else None
    return found.of(module) if found is not None else None


def put_weight(module: nn.Module, weight: Weight | None) -> None:
    """Give a linear layer of a registered class a weight; None frees the memory of the one it has."""
    _FORMATS[type(module)].put(module, weight)


_HELD_AS = "held_as"
"""Name of the attribute of a module whose weight has another form beside its tensor."""


def hold_as(module: nn.Module, form: type[PlainWeight] | None) -> None:
    """Let the tensors of `module` be weights of this form, a subclass of PlainWeight; None: plain ones."""
    if form is not None:
        setattr(module, _HELD_AS, form)
    else:
        vars(module).pop(_HELD_AS, None)


def held_as(module: nn.Module) -> type[PlainWeight]:
    """Return the form that `hold_as` chose for the tensors of `module`."""
    form: type[PlainWeight] = getattr(module, _HELD_AS, PlainWeight)
    return form


def _put_plain(module: nn.Linear, weight: Weight | None) -> None:
    values = weight.dense() if weight is not None else module.weight.new_empty(0)
    module.weight = nn.Parameter(values, requires_grad=False)


register_format(nn.Linear, WeightFormat(lambda module: held_as(module)(module.weight), _put_plain))
