"""Guidance's widget for notebooks shows what a `GraftModel` writes."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
from guidance import gen
from guidance.registry import get_renderer, get_trace_handler, set_renderer
from guidance.trace import TokenOutput
from guidance.visual import AutoRenderer, TraceMessage
from guidance.visual._renderer import JupyterWidgetRenderer
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from graftlm.adapters.guidance import GraftModel
from graftlm.core.runtime import Runtime
from tests.adapters.guidance.guidance_plugin import tame_model, trained_tokenizer


class ZMQInteractiveShell(InteractiveShell):
    """By this class name guidance knows a notebook."""


@pytest.fixture
def notebook() -> Iterator[InteractiveShell]:
    before = get_renderer()
    shell = ZMQInteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    set_renderer(AutoRenderer(get_trace_handler()))
    yield shell
    set_renderer(before)
    ZMQInteractiveShell.clear_instance()
    gc.collect()


def widget_of(renderer: Any) -> JupyterWidgetRenderer:
    (inner,) = (one for one in vars(renderer).values() if isinstance(one, JupyterWidgetRenderer))
    return inner


def test_a_notebook_shows_every_token_with_its_probability(notebook: InteractiveShell) -> None:
    tokenizer = trained_tokenizer()
    with Runtime(tame_model(tokenizer), tokenizer=tokenizer, dtype="float32") as runtime:
        with contextlib.redirect_stdout(io.StringIO()):
            lm = GraftModel(runtime=runtime, echo=True) + "Say: " + gen("x", max_tokens=5)
        renderer = widget_of(get_renderer())
        assert renderer.last_widget is not None
        widget = renderer.last_widget()
        shown = [m.node_attr for m in renderer.widget_messages[widget] if isinstance(m, TraceMessage)]
        tokens = [one for one in shown if isinstance(one, TokenOutput) and one.is_generated]
        text = "".join(token.value for token in tokens)  # the first token may spell the prompt's last one, too
        assert len(tokens) >= 5 and text.endswith(lm["x"]) and str(lm).endswith(text)
        assert all(0 < token.token.prob <= 1 and len(token.top_k) == 5 for token in tokens)
