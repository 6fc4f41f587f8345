"""Scripts whose constructor call is replaced; nothing of the framework has to be installed for that class."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graftlm.ab.script import Script
from graftlm.core.errors import ConfigError

SCRIPT = '''"""Greets."""
import sys
from langchain_openai import ChatOpenAI
from langchain_core.output_parsers import StrOutputParser

if __name__ == "__main__":
    llm = ChatOpenAI(model="gpt-4o-mini", max_tokens=7, temperature=0.2)
    print(sys.argv, llm.invoke("Hello"))
'''


class Shout:
    def invoke(self, text: str) -> str:
        return text.upper()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_the_constructor_gives_the_engine_and_the_printed_text_is_the_answer(tmp_path: Path) -> None:
    script = Script.load(path := written(tmp_path, SCRIPT), "ChatOpenAI")
    assert (script.framework, script.max_tokens, script.unused) == ("langchain", 7, ("model", "temperature"))
    assert script.run(Shout()) == f"{[str(path)]} HELLO\n"


@pytest.mark.parametrize(
    ("text", "constructor", "framework"),
    [
        ("import dspy\nprint(dspy.LM('x'))", "dspy.LM", "dspy"),
        ("import dspy as d\nprint(d.LM('x'))", "LM", "dspy"),
        ("from guidance import models\nprint(models.OpenAI('x'))", "models.OpenAI", "guidance"),
        ("from llama_index.llms.openai import OpenAI\nprint(OpenAI())", "OpenAI", "llama_index"),
    ],
)
def test_constructors_of_each_framework_are_known_by_their_import(
    tmp_path: Path, text: str, constructor: str, framework: str
) -> None:
    assert Script.load(written(tmp_path, text), constructor).framework == framework


def test_a_script_may_write_bytes_and_set_the_encoding_of_its_output(tmp_path: Path) -> None:
    """Its output was a text alone: AttributeError, although `python script.py` runs."""
    text = SCRIPT.replace(
        "print(sys.argv,", "sys.stdout.reconfigure(encoding='utf-8')\n    print('😀', end=' ')\n    print("
    )
    script = Script.load(written(tmp_path, text + "    sys.stdout.buffer.write('é\\n'.encode())\n"), "ChatOpenAI")
    assert script.run(Shout()) == "😀 HELLO\né\n"


def test_a_script_is_the_main_module_and_keeps_its_annotations(tmp_path: Path) -> None:
    """Its annotations became texts, as ours are, and pydantic looked for their names among ours."""
    text = (
        "import dspy\nfrom pydantic import BaseModel\nclass Part(BaseModel): n: int\n"
        "class Whole(BaseModel): parts: list[Part]\n"
        "dspy.LM('x')\nprint(Whole(parts=[{'n': 1}]).parts[0], Whole.__annotations__['parts'] == list[Part])\n"
        "try: int('x')\nexcept ValueError: pass\n"
    )
    script = Script.load(written(tmp_path, text), "dspy.LM")
    assert script.run(None) == "n=1 True\n"
    assert script.caught.told() == ["ValueError: invalid literal for int() with base 10: 'x'"]


def test_a_class_of_a_part_of_llama_index_need_not_be_installed(tmp_path: Path) -> None:
    """Its first name, `llama_index`, is there without it: the script failed, and was to install llama-index-core."""
    text = "from llama_index.llms.no_such_llm import NoSuch\nprint(NoSuch())"
    assert Script.load(written(tmp_path, text), "NoSuch").run("engine") == "engine\n"
    text = "import json, llama_index.llms.no_such_llm as no\nprint(json.dumps(no.NoSuch()))"
    assert Script.load(written(tmp_path, text), "NoSuch").run("engine") == '"engine"\n'
    text = "import llama_index.llms.no_such_llm\nprint(llama_index.llms.no_such_llm.NoSuch())"
    assert Script.load(written(tmp_path, text), "NoSuch").run("engine") == "engine\n"


def test_a_script_ends_as_it_ends_by_itself(tmp_path: Path) -> None:
    ending = "import dspy, sys\ndspy.LM()\nprint('said')\nsys.exit({})"
    assert Script.load(written(tmp_path, ending.format("")), "dspy.LM").run(None) == "said\n"
    with pytest.raises(RuntimeError, match="ended with status 3"):
        Script.load(written(tmp_path, ending.format(3)), "dspy.LM").run(None)


def test_a_module_beside_the_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "a_module_beside_the_script.py").write_text("WORD = 'beside'")
    text = "import dspy, a_module_beside_the_script as m\ndspy.LM()\nprint(m.WORD)"
    assert Script.load(written(tmp_path, text), "dspy.LM").run(None) == "beside\n"


@pytest.mark.parametrize(
    ("text", "constructor", "message"),
    [
        (SCRIPT, "ChatAnthropic", "calls no 'ChatAnthropic'.*that it calls: langchain_openai.ChatOpenAI"),
        ("import dspy\ndspy.Predict('q -> a')(q='x')", "dspy.LM", "that it calls: dspy.Predict$"),
        ("print('Hello')", "ChatOpenAI", "that it calls: none"),
        ("from collections import Counter\nCounter()", "Counter", "belongs to none of LangChain"),
        ("from langchain_openai import OpenAI\nOpenAI()", "OpenAI", "completes texts"),
        ("def (", "ChatOpenAI", "is not Python"),
    ],
)
def test_a_script_that_does_not_fit_is_an_error(tmp_path: Path, text: str, constructor: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Script.load(written(tmp_path, text), constructor)


def test_a_script_that_prints_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="printed nothing"):
        Script.load(written(tmp_path, f"import dspy\ndspy.LM()\nx = {os.sep!r}"), "dspy.LM").run(None)
