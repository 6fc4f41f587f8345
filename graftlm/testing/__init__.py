"""Test doubles of weights, for tests of pipelines and plugins: no download, and answers within milliseconds.

They serve users' tests and this repository's; a runtime never loads them.

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.testing import ScriptedModel

model = ScriptedModel(lambda prompt: "Dorvik")
with model.runtime() as runtime:
    assert ChatGraftLM(runtime=runtime).invoke("Where does Mara live?").content == "Dorvik"
assert "Where does Mara live?" in model.prompts[0]
"""

from graftlm.testing.byte_tokenizer import byte_tokenizer
from graftlm.testing.random_model import random_model
from graftlm.testing.scripted_model import ScriptedModel

__all__ = ["ScriptedModel", "byte_tokenizer", "random_model"]
