"""SGLang, offline: its engine runs in processes of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.workloads import Answer, Ids

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class SGLang:
    started: dict[str, float] = {}

    def __init__(self, folder: str) -> None:
        import sglang
        from sglang.srt.entrypoints.engine import Engine

        self.about = {"version": sglang.__version__}
        self.engine = Engine(
            model_path=folder,
            load_format="dummy",
            dtype="bfloat16",
            random_seed=0,
            context_length=16_384,
            max_running_requests=256,
            cuda_graph_max_bs_decode=256,
            mem_fraction_static=0.85,
            sampling_backend="pytorch",  # the cut-down build holds no FlashInfer
            grammar_backend="xgrammar",
            constrained_json_disable_any_whitespace=True,
            log_level="info",
        )

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": schema is None}
        if schema is not None:
            params["json_schema"] = json.dumps(schema)
        outputs = self.engine.generate(input_ids=list(prompts), sampling_params=params)
        return [Answer(o["output_ids"], o["meta_info"].get("cached_tokens"), o.get("text")) for o in outputs]

    def flush(self) -> None:
        self.engine.flush_cache()

    def close(self) -> None:
        self.engine.shutdown()


def start(folder: str | None) -> SGLang:
    if folder is None:
        raise NotImplementedError("SGLang needs a GPU and a model folder")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TVM_FFI_CACHE_DIR", os.path.join(tempfile.gettempdir(), "sglang-kernels"))
    link_driver()
    return SGLang(folder)


def link_driver() -> None:
    """Let a linker find the driver where only libcuda.so.1 is installed: SGLang compiles small kernels at first use."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    driver = re.search(r"libcuda\.so\.1 .*=> (\S+)", known)
    if driver is not None:
        folder = Path(tempfile.mkdtemp(prefix="driver-"))
        (folder / "libcuda.so").symlink_to(driver[1])
        os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("LIBRARY_PATH")]))
