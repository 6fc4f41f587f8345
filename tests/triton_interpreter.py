"""Triton's interpreter without work that changes nothing: most of the time of kernel tests without a GPU.

It looks through all of triton.language for built-in functions before each call of a device function, which the kernel
has done for it, checks the integers of each sum and product for overflow only to drop the finding, as its `debug` is
off, and describes shapes anew for each value. Of two values of one type it works out the common one, it fills a table
of all types to look up one, and takes keyword arguments apart at each call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from triton.language import semantic
from triton.runtime import interpreter

core = interpreter.tl.core
_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_unwrap_if_constexpr = core._unwrap_if_constexpr
_broadcast_impl_value = semantic.TritonSemantic.broadcast_impl_value
_binary_op_type_checking_impl = semantic.TritonSemantic.binary_op_type_checking_impl

_CHECKED = core.builtin(lambda: None).__code__
"""The code around each built-in function, which looks whether it is called from a kernel."""
_PLAIN = {int, bool, float, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}
"""Types of values that hold no other value."""


def quicken() -> None:
    """Find built-in functions once per kernel's run, know each shape once, and do not check what nobody is told."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_once
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _np_dtype
    core._unwrap_if_constexpr = _unwrap
    semantic.TritonSemantic.broadcast_impl_value = _broadcast
    semantic.TritonSemantic.binary_op_type_checking_impl = _operands
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@functools.cache
def _builtins_of(holder: Any) -> list[str]:
    """Asked for first while nothing of `holder` is patched."""
    return [name for name, member in interpreter.inspect.getmembers(holder) if core.is_builtin(member)]


def _patch_builtin(holder: Any, *rest: Any) -> None:
    for name in _builtins_of(holder):
        member = getattr(holder, name)
        if core.is_builtin(member):  # not patched yet
            _patch_attr(holder, name, member, *rest)


@functools.cache
def _languages_of(function: Any) -> frozenset[str]:
    """Names of the modules of triton.language that the module of a function knows."""
    modules = (value for value in function.__globals__.values() if interpreter.inspect.ismodule(value))
    return frozenset(module.__name__ for module in modules if module in (interpreter.tl, core))


def _patch_once(function: Any) -> Any:
    """Patch for a kernel; for a device function that it calls only what is not patched for the kernel."""
    languages = _languages_of(function)
    patched = getattr(interpreter, "_patched", None)
    if patched is not None and languages <= patched:
        return None
    scope = _patch_lang(function)
    if patched is None:
        scope.set_attr(interpreter, "_patched", set(languages))  # until the kernel's scope restores what it changed
    else:
        patched.update(languages)
    return scope


@functools.cache
def _described(shape: tuple[int, ...], element: str) -> tuple[int, str]:
    return interpreter.tl.core.validate_block_shape(shape), f"<{shape}, {element}>"


@functools.cache
def _shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def _patch_attr(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    function = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(holder, name, call)


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    return value.value if kind is core.constexpr else _unwrap_if_constexpr(value)


_known_dtypes: dict[str, Any] = {}


def _np_dtype(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, core.block_type) else kind
    if isinstance(element, core.pointer_type):
        return _get_np_dtype(element)
    found = _known_dtypes.get(element.name)
    if found is None:
        found = _known_dtypes[element.name] = _get_np_dtype(element)
    return found


_widest = functools.cache(np.broadcast_shapes)


def _broadcast(rules: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    left, right = lhs.type, rhs.type
    if not left.is_block() or not right.is_block():
        found: tuple[Any, Any] = _broadcast_impl_value(rules, lhs, rhs)
        return found
    if left.shape == right.shape:
        return lhs, rhs
    shape = _widest(left.shape, right.shape)
    return _widened(rules, lhs, shape), _widened(rules, rhs, shape)


def _widened(rules: Any, value: Any, shape: tuple[int, ...]) -> Any:
    if value.type.shape == shape:
        return value
    handle = rules.builder.create_broadcast(value.handle, shape)
    return rules.make_tensor(handle, core.block_type(value.type.scalar, shape))


def _operands(
    rules: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Two values of one type stay as they are; what is divided may have to become wider."""
    tensors = type(lhs) is core.tensor and type(rhs) is core.tensor
    if tensors and lhs.dtype is rhs.dtype and not div_or_mod and not lhs.dtype.is_ptr():
        return rules.broadcast_impl_value(lhs, rhs)
    return _binary_op_type_checking_impl(rules, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _init_block_type(block: Any, element_ty: Any, shape: Any) -> None:
    block.element_ty = element_ty
    block.shape = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    if not block.shape:
        raise TypeError("0d block_type is forbidden")
    block.numel, block.name = _described(block.shape, str(element_ty))


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    core.base_value.__init__(tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = _shape_of(type.shape if type.is_block() else ())
