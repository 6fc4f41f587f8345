"""Products are compiled for the processor that runs them, and for no other."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

AVX2 = "+avx,+avx2,+fma"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
COMPILE = """
import sys
from graftlm.kernels.cpu.loops.matmul import compile_matmul
open(sys.argv[1], "wb").write(compile_matmul(True, sys.argv[2] == "True").code)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86's instructions")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize(
    ("processor", "features", "has_zmm", "has_dots"),
    [
        ("haswell", AVX2, False, False),
        ("skylake-avx512", AVX512, True, False),
        ("cooperlake", f"{AVX512},+avx512bf16", True, True),
    ],
)
def test_bfloat16_products_have_only_the_instructions_of_their_processor(
    processor: str, features: str, has_zmm: bool, has_dots: bool, row_major: bool, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
    }
    code = tmp_path / "matmul.o"
    subprocess.run([sys.executable, "-c", COMPILE, str(code), str(row_major)], check=True, env=environment)
    shown = subprocess.run(["objdump", "-d", str(code)], check=True, capture_output=True, text=True).stdout
    assert "ret" in shown
    assert ("%zmm" in shown) is has_zmm
    assert ("vdpbf16ps" in shown) is has_dots
