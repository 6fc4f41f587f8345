"""The frameworks' own prompts as templates: `python -m bench.sprout.wires OUT.json`.

The machine that trains has none of the frameworks, so their formatters run here, once, over
placeholders (`zzin0`, `zzout1`, `zztool0`, ...) in place of field names, descriptions, options and
values. `Wires` fills the placeholders in again. tests/bench/test_sprout_wires.py holds the result
against the live formatters, byte for byte.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

PLACEHOLDER = re.compile(r"zz[a-z]+\d*")
PATH = Path(__file__).parents[2] / "out" / "sprout" / "wires.json"

# "lit3" is Literal with three options
TYPES = ("str", "int", "bool", "list", "lit2", "lit3", "lit4", "lit5")
_HINTS: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "list": list[str],
} | {f"lit{k}": None for k in (2, 3, 4, 5)}
_ARGUMENTS: tuple[tuple[str, ...], ...] = (
    (),
    ("str",),
    ("int",),
    ("str", "str"),
    ("int", "int"),
    ("str", "int"),
    ("str", "str", "str"),
    ("str", "str", "int"),
)


class Wires:
    """The stored templates, and how they are filled in."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.dspy: dict[str, dict[str, str]] = data["dspy"]
        self.react: dict[str, dict[str, str]] = data["react"]
        self.llama_index: dict[str, list[dict[str, str]]] = data["llama_index"]
        self.langchain: dict[str, list[dict[str, str]]] = data["langchain"]
        self.tools: list[dict[str, Any]] = data["tools"]
        self.records: list[dict[str, Any]] = data["records"]
        self.instructions: list[dict[str, Any]] = data["instructions"]

    @classmethod
    def load(cls, path: Path = PATH) -> Wires:
        """Read what `main` stored, or call the frameworks if it stored nothing."""
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.exists() else build())

    def messages(self, name: str, **values: str) -> list[dict[str, str]]:
        """Return a LangChain or LlamaIndex prompt by name, its placeholders `zz<key>` filled in."""
        table = self.langchain if name in self.langchain else self.llama_index
        filled = {f"zz{key}": value for key, value in values.items()}
        return [{"role": m["role"], "content": fill(m["content"], filled)} for m in table[name]]


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder that `values` has; the others stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[0], match[0]), template)


def dspy_key(adapter: str, num_inputs: int, outputs: tuple[str, ...], described: bool) -> str:
    return f"{adapter}|{num_inputs}|{','.join(outputs)}|{'described' if described else 'bare'}"


def _hint(kind: str, index: int) -> Any:
    if kind.startswith("lit"):
        return Literal[tuple(f"zzopt{index}{j}" for j in range(int(kind[3:])))]
    return _HINTS[kind]


def _signature(num_inputs: int, outputs: tuple[str, ...], described: bool) -> Any:
    import dspy

    fields: dict[str, Any] = {}
    for i in range(num_inputs):
        fields[f"zzin{i}"] = (str, dspy.InputField(desc=f"zzindesc{i}") if described else dspy.InputField())
    for i, kind in enumerate(outputs):
        field = dspy.OutputField(desc=f"zzoutdesc{i}") if described else dspy.OutputField()
        fields[f"zzout{i}"] = (_hint(kind, i), field)
    return dspy.Signature(fields, "zzobjective")


def _combinations(rng: random.Random) -> list[tuple[str, ...]]:
    """Return every single output and pair of types, and a sample of the longer combinations."""
    combinations = [c for n in (1, 2) for c in itertools.product(TYPES, repeat=n)]
    combinations += [("str", *c) for c in itertools.product(TYPES, repeat=2)]
    longer = [c for n in (3, 4) for c in itertools.product(TYPES, repeat=n)]
    combinations += rng.sample(longer, 200)
    return list(dict.fromkeys(combinations))


def dspy_templates(combinations: Iterable[tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Format signatures with these output types and one to three inputs, described or not, by both adapters."""
    import dspy

    adapters = {"chat": dspy.ChatAdapter(), "json": dspy.JSONAdapter()}
    templates: dict[str, dict[str, str]] = {}
    for outputs in combinations:
        for num_inputs, described, (name, adapter) in itertools.product((1, 2, 3), (False, True), adapters.items()):
            signature = _signature(num_inputs, outputs, described)
            values = {f"zzin{i}": f"zzval{i}" for i in range(num_inputs)}
            demo = values | {f"zzout{i}": f"zzval9{i}" for i in range(len(outputs))}
            system, demo_user, _, request = adapter.format(signature, [demo], values)
            templates[dspy_key(name, num_inputs, outputs, described)] = {
                "system": system["content"],
                "demo": demo_user["content"],
                "request": request["content"],
            }
    return templates


def _function(name: str, arguments: tuple[str, ...]) -> Any:
    """Return a real function for the frameworks to inspect."""
    tool = name[-1]
    inside = ", ".join(f"zzarg{tool}{i}: {kind}" for i, kind in enumerate(arguments))
    source = f"def {name}({inside}) -> str:\n    '''zzabout{tool}.'''\n    return ''\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<tool>", "exec", dont_inherit=True), scope)
    return scope[name]


def react_key(tools: tuple[tuple[str, ...], ...]) -> str:
    return "|".join(",".join(arguments) for arguments in tools)


def _react_templates(rng: random.Random) -> dict[str, dict[str, str]]:
    """dspy.ReAct over "question -> answer" with one to four tools, by the tools' argument types."""
    import dspy

    sets: list[tuple[tuple[str, ...], ...]] = [(a,) for a in _ARGUMENTS[1:]]
    sets += [tuple(rng.choice(_ARGUMENTS[1:]) for _ in range(n)) for n in (2, 3, 4) for _ in range(16)]
    templates: dict[str, dict[str, str]] = {}
    for tools in sets:
        functions = [_function(f"zztool{t}", arguments) for t, arguments in enumerate(tools)]
        agent = dspy.ReAct("zzin0 -> zzout0", tools=functions)
        values = {"zzin0": "zzval0", "trajectory": "zzval1"}
        step = dspy.ChatAdapter().format(agent.react.signature, [], values)
        last = dspy.ChatAdapter().format(agent.extract.predict.signature, [], values)
        templates[react_key(tools)] = {
            "system": step[0]["content"],
            "request": step[1]["content"],
            "final_system": last[0]["content"],
            "final_request": last[1]["content"],
        }
    return templates


_LANGCHAIN_PROMPTS: dict[str, list[tuple[str, str]]] = {
    "stuff": [
        ("system", "Use the following pieces of context to answer the question at the end.\n\n{context}"),
        ("human", "{question}"),
    ],
    "rag": [
        (
            "human",
            "You are an assistant for question-answering tasks. Use the following pieces of retrieved context "
            "to answer the question. If you don't know the answer, just say unknown. Use three sentences maximum and "
            "keep the answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:",
        )
    ],
    "qa_system": [
        ("system", "Answer the question based only on the following context:\n{context}"),
        ("human", "{question}"),
    ],
    "qa_human": [
        ("human", "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n")
    ],
    "extract": [
        (
            "system",
            "You are an expert extraction algorithm. Only extract relevant information from the text. If "
            "you do not know the value of an attribute asked to extract, return null for the attribute's value.",
        ),
        ("human", "{text}"),
    ],
    "extract_short": [("human", "Extract the desired information from the following passage.\n\nPassage:\n{text}\n")],
    "tagging": [
        (
            "human",
            "Extract the desired information from the following passage.\n\nOnly extract the properties "
            "mentioned in the 'Classification' function.\n\nPassage:\n{text}\n",
        )
    ],
    "summary": [("system", "Write a concise summary of the following:\n\n{text}")],
    "summary_human": [("human", 'Write a concise summary of the following:\n\n\n"{text}"\n\n\nCONCISE SUMMARY:')],
    "reduce": [
        (
            "human",
            "The following is a set of summaries:\n{text}\nTake these and distill it into a final, "
            "consolidated summary of the main themes.",
        )
    ],
    "map_question": [
        (
            "human",
            "Use the following portion of a long document to see if any of the text is relevant to "
            "answer the question.\nReturn any relevant text verbatim.\n{context}\nQuestion: {question}\n"
            "Relevant text, if any:",
        )
    ],
}


def _langchain_templates() -> dict[str, list[dict[str, str]]]:
    from langchain_core.messages import convert_to_openai_messages
    from langchain_core.prompts import ChatPromptTemplate

    templates: dict[str, list[dict[str, str]]] = {}
    for name, prompt in _LANGCHAIN_PROMPTS.items():
        chat_prompt = ChatPromptTemplate.from_messages(prompt)
        value = chat_prompt.invoke({key: f"zz{key}" for key in chat_prompt.input_variables})
        templates[name] = [
            {"role": m["role"], "content": m["content"]} for m in convert_to_openai_messages(value.to_messages())
        ]
    return templates


def _llama_index_templates() -> dict[str, list[dict[str, str]]]:
    """Return the stock prompts of the response synthesizers, the reranker and the selectors, chat and text forms."""
    from llama_index.core.llms.mock import MockLLM
    from llama_index.core.prompts import chat_prompts, default_prompts
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.selectors.prompts import DEFAULT_SINGLE_SELECT_PROMPT_TMPL

    slots = {
        "context_str": "zzcontext",
        "query_str": "zzquery",
        "existing_answer": "zzanswer",
        "context_msg": "zzcontext",
    }
    chats = {
        "li_qa_chat": chat_prompts.CHAT_TEXT_QA_PROMPT,
        "li_refine_chat": chat_prompts.CHAT_REFINE_PROMPT,
        "li_tree_chat": chat_prompts.CHAT_TREE_SUMMARIZE_PROMPT,
        "li_qa": default_prompts.DEFAULT_TEXT_QA_PROMPT,
        "li_refine": default_prompts.DEFAULT_REFINE_PROMPT,
        "li_tree": default_prompts.DEFAULT_TREE_SUMMARIZE_PROMPT,
        "li_rerank": default_prompts.DEFAULT_CHOICE_SELECT_PROMPT,
        "li_summary": default_prompts.DEFAULT_SUMMARY_PROMPT,
    }
    templates = {
        name: [
            {"role": str(m.role.value), "content": str(m.content)}
            for m in prompt.format_messages(llm=MockLLM(), **{k: v for k, v in slots.items()})
        ]
        for name, prompt in chats.items()
    }
    selector = LLMSingleSelector.from_defaults(llm=MockLLM())._prompt
    values: dict[str, Any] = {"num_choices": "zzcount", "context_list": "zzchoices", "query_str": "zzquery"}
    templates["li_selector"] = [{"role": "user", "content": selector.format(**values)}]
    templates["li_selector_structured"] = [
        {"role": "user", "content": DEFAULT_SINGLE_SELECT_PROMPT_TMPL.format(**values)}
    ]
    return templates


def _tool_templates() -> list[dict[str, Any]]:
    """Tool schemas as LangChain (from a function, from a model) and LlamaIndex write them."""
    from langchain_core.tools import StructuredTool
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from llama_index.core.tools import FunctionTool
    from pydantic import Field, create_model

    templates: list[dict[str, Any]] = []
    for arguments in _ARGUMENTS:
        function = _function("zztool0", arguments)
        hints = {"str": str, "int": int}
        described: dict[str, Any] = {
            f"zzarg0{i}": (hints[kind], Field(description=f"zzargdesc0{i}")) for i, kind in enumerate(arguments)
        }
        model = create_model("zztool0", __doc__="zzabout0.", **described)
        tools = {
            "langchain": convert_to_openai_tool(StructuredTool.from_function(function)),
            "pydantic": convert_to_openai_tool(model),
            "llama_index": FunctionTool.from_defaults(function).metadata.to_openai_tool(),
        }
        templates += [
            {"style": style, "arguments": arguments, "schema": json.dumps(tool)} for style, tool in tools.items()
        ]
    return templates


def _record_templates(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pydantic models of one to four fields: as tools, and as output parsers' format instructions."""
    from langchain_core.output_parsers import PydanticOutputParser as LangChainParser
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from llama_index.core.output_parsers import PydanticOutputParser as LlamaIndexParser
    from llama_index.core.program.function_program import get_function_tool
    from pydantic import Field, create_model

    tools: list[dict[str, Any]] = []
    instructions: list[dict[str, Any]] = []
    plain = ("str", "int", "bool", "list")
    combinations = [c for n in (1, 2) for c in itertools.product(plain, repeat=n)]
    combinations += rng.sample([c for n in (3, 4) for c in itertools.product(plain, repeat=n)], 60)
    for kinds, described in itertools.product(combinations, (False, True)):
        fields: dict[str, Any] = {
            f"zzout{i}": (_HINTS[kind], Field(description=f"zzoutdesc{i}") if described else ...)
            for i, kind in enumerate(kinds)
        }
        model = create_model("zzrecord", __doc__="zzabout.", **fields)
        schemas = (convert_to_openai_tool(model), get_function_tool(model).metadata.to_openai_tool())
        tools += [{"kinds": kinds, "schema": json.dumps(schema)} for schema in schemas]
        langchain = LangChainParser(pydantic_object=model).get_format_instructions()
        llama_index = LlamaIndexParser(model).format("zzquery")
        instructions.append({"kinds": kinds, "style": "langchain", "text": langchain})
        instructions.append({"kinds": kinds, "style": "llama_index", "text": llama_index})
    return tools, instructions


def build(seed: int = 0, combinations: Iterable[tuple[str, ...]] | None = None) -> dict[str, Any]:
    """Call the installed frameworks' formatters: seconds. `combinations` limits DSPy's output types."""
    combinations = _combinations(random.Random(seed)) if combinations is None else combinations
    records, instructions = _record_templates(random.Random(seed))
    data = {
        "dspy": dspy_templates(combinations),
        "react": _react_templates(random.Random(seed)),
        "langchain": _langchain_templates(),
        "llama_index": _llama_index_templates(),
        "tools": _tool_templates(),
        "records": records,
        "instructions": instructions,
    }
    stored: dict[str, Any] = json.loads(json.dumps(data))  # the same whether it was stored or not
    return stored


def main(argv: list[str]) -> int:
    path = Path(argv[0]) if argv else PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(build(), ensure_ascii=False), encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
