"""Triton's interpreter without work that changes nothing: most of the time of kernel tests without a GPU.

It looks through all of triton.language for built-in functions before each call of a device function, which the kernel
has done for it, checks the integers of each sum and product for overflow only to drop the finding, as its `debug` is
off, and describes shapes anew for each value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from triton.runtime import interpreter

core = interpreter.tl.core
_patch_lang = interpreter._patch_lang


def quicken() -> None:
    """Find built-in functions once per kernel's run, know each shape once, and do not check what nobody is told."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_once
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
            interpreter._patch_attr(holder, name, member, *rest)


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


def _init_block_type(block: Any, element_ty: Any, shape: Any) -> None:
    block.element_ty = element_ty
    block.shape = tuple(core._unwrap_shape(shape))
    if not block.shape:
        raise TypeError("0d block_type is forbidden")
    block.numel, block.name = _described(block.shape, str(element_ty))


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    core.base_value.__init__(tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = _shape_of(type.shape if type.is_block() else ())
