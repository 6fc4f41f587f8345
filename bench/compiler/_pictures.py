"""python -m bench.compiler._pictures: write the drawings of docs/primitives.md."""

from __future__ import annotations

from contextlib import redirect_stdout

import graftlm as gl
from bench.harness import ROOT

FOLDER = ROOT / "docs/trees"


def drawings() -> dict[str, str]:
    """Return the drawing of each primitive by its name."""
    primitives = {
        "vote": gl.vote(3),
        "best_of": gl.best_of(3, len),
        "beam": gl.beam(2, 3, len),
        "chain_of_thought": gl.chain_of_thought(),
        "map": gl.map(["Mara", "Tom", "Ida"]),
    }
    with gl.Runtime("sprout") as runtime, redirect_stdout(None):
        return {name: one.plan([{"prompt": "Q:"}], runtime=runtime).svg() for name, one in primitives.items()}


if __name__ == "__main__":
    for name, text in drawings().items():
        (FOLDER / f"{name}.svg").write_text(text)
