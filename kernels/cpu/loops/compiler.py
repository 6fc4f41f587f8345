"""Compilation of a Python function to object code, by numba."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import from_dtype, types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.sigutils import normalize_signature

from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.loops.arithmetic import FLAGS


def compile_loop(call: type[ctypes.Structure], work: Callable[..., Any]) -> MachineCode:
    """Compile `work`, a function of a pointer to `call`, for this processor."""
    with global_compiler_lock:
        return _compile(call, work)


def _compile(call: type[ctypes.Structure], work: Callable[..., Any]) -> MachineCode:
    llvm.initialize_native_asmparser()  # register_tiles.py has instructions of its own
    signature = types.void(types.CPointer(from_dtype(np.dtype(call))))
    function: Any = CFunc(work, normalize_signature(signature), locals={}, options=dict(FLAGS))
    compiled = function._compile_uncached()
    symbol: str = compiled.fndesc.llvm_cfunc_wrapper_name
    compiled.library.get_pointer_to_function(symbol)  # numba generates code at the first access
    module = compiled.library._final_module
    declared = (x.name for x in (*module.functions, *module.global_variables) if x.is_declaration)
    needs = tuple(sorted(name for name in declared if not name.startswith("llvm.")))
    return MachineCode(symbol, compiled.library._get_compiled_object(), needs)
