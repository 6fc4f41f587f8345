"""Triton's launchers are C extensions of one module name; each that is loaded stays its own."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime import build

from graftlm.kernels.jit.precompile import load_launchers_apart

LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_launcher_that_is_loaded_again_stays_apart_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that load known files are this order of loads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load_launchers_apart()
    for _ in range(2):
        loaded = [build.compile_module_from_src(LAUNCHER % number, "__triton_launcher") for number in (1, 2, 3)]
    assert [module.launch() for module in loaded] == [1, 2, 3]
