from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.chat.messages import ToolCall
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_grammar import ToolChoice, tool_constraint
from graftlm.core.chat.tools import Tool
from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.vocabulary import Vocabulary

FORM = ToolFormat()
ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
PUT = Tool("put", {"type": "object", "properties": {"data": {"type": "object"}}, "required": ["data"]})
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], eos_token_id=256)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def accepts(text: str, tools: list[Tool], choice: Any = None, **options: Any) -> bool:
    """Whether an answer that is exactly `text` is allowed."""
    params = tool_constraint(FORM, tools, choice, **options)
    matcher = Grammar.compile(params.get("constraint") or params["json_schema"], VOCABULARY).matcher()
    data = list(text.encode())
    return matcher.advance(data) == len(data) and matcher.accepting


def write(*calls: tuple[str, dict[str, Any]]) -> str:
    return FORM.write(ToolCall("", name, arguments) for name, arguments in calls)


ONE, TWO = write(("add", {"a": 1})), write(("add", {"a": 1}), ("add", {"a": 22}))


@pytest.mark.parametrize(
    ("choice", "parallel", "allowed", "forbidden"),
    [
        ("auto", None, ["", "free text", ONE, TWO, f"Let me see.\n{ONE}"], ["<tool_call>", ONE[:-1]]),
        ("auto", False, ["free text", ONE], [TWO]),
        ("any", None, [ONE, TWO], ["", "free text", f"Let me see.\n{ONE}"]),
        ("add", None, [ONE], ["", TWO, write(("put", {"data": {}}))]),
        ("none", None, ["", "free text"], [ONE, "a <tool_call> b"]),
    ],
)
def test_the_choice_says_what_an_answer_may_be(
    choice: str, parallel: bool | None, allowed: list[str], forbidden: list[str]
) -> None:
    assert [accepts(text, [ADD], choice, parallel=parallel) for text in allowed] == [True] * len(allowed)
    assert [accepts(text, [ADD], choice, parallel=parallel) for text in forbidden] == [False] * len(forbidden)


def test_arguments_follow_their_schema() -> None:
    assert not accepts(write(("add", {"a": "1"})), [ADD], "any")
    assert not accepts(write(("add", {})), [ADD], "any")
    assert not accepts(write(("add", {"a": 1, "b": 2})), [ADD], "any")


def test_with_an_answer_schema_the_text_is_that_json_or_a_call() -> None:
    assert accepts('{"ok":true}', [ADD], "auto", answer=ANSWER)
    assert accepts(ONE, [ADD], "auto", answer=ANSWER)
    assert not accepts("free text", [ADD], "auto", answer=ANSWER)
    assert not accepts('{"ok":true}', [ADD], "any", answer=ANSWER)
    assert accepts('{"ok":true}', [ADD], "none", answer=ANSWER)
    assert accepts('{"ok":true}', [], None, answer=ANSWER)


def test_a_free_form_argument_holds_any_json_object() -> None:
    nested = write(("put", {"data": {"a": [1, {"b": None}], "c": "}"}}))
    assert accepts(nested, [ADD, PUT], "any")
    assert accepts(ONE, [ADD, PUT], "any")
    assert accepts("free text", [ADD, PUT], "auto")
    assert not accepts(write(("put", {"data": 1})), [ADD, PUT], "any")


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}, "required": []}])
def test_a_tool_without_parameters_gets_no_arguments(parameters: dict[str, Any] | None) -> None:
    assert accepts(write(("stop", {})), [Tool("stop", parameters)], "any")
    assert not accepts(write(("stop", {"why": "x"})), [Tool("stop", parameters)], "any")


@pytest.mark.parametrize("more", [{"properties": {}, "additionalProperties": True}, {"minProperties": 1}, {}])
def test_a_tool_that_says_so_gets_any_arguments(more: dict[str, Any]) -> None:
    assert accepts(write(("put", {"a": 1})), [Tool("put", {"type": "object", **more})], "any")


def test_arguments_are_an_object_where_the_schema_names_no_type() -> None:
    either = Tool("put", {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}]})
    assert accepts(write(("put", {"a": 1})), [either], "any")
    assert not accepts(write(("put", {"a": 1})).replace('{"a": 1}', '"a"'), [either], "any")


def test_two_recursive_schemas_keep_their_definitions_apart() -> None:
    def tree(name: str, leaf: str) -> Tool:
        node = {
            "type": "object",
            "properties": {"v": {"type": leaf}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
        root = {"type": "object", "properties": {"r": {"$ref": "#/$defs/node"}}, "required": ["r"]}
        return Tool(name, {**root, "$defs": {"node": node}})

    tools = [tree("ints", "integer"), tree("texts", "string")]
    assert accepts(write(("ints", {"r": {"v": 1, "next": {"v": 2, "next": None}}})), tools, "any")
    assert accepts(write(("texts", {"r": {"v": "a", "next": {"v": "b", "next": None}}})), tools, "any")
    assert not accepts(write(("ints", {"r": {"v": 1, "next": {"v": "b", "next": None}}})), tools, "any")


def test_equal_tools_give_the_same_constraint_object() -> None:
    again = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert tool_constraint(FORM, [ADD])["constraint"] is tool_constraint(FORM, [again])["constraint"]


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["add", "put"]),
        ("required", "required", ["add", "put"]),
        (True, "required", ["add", "put"]),
        ("put", "required", ["put"]),
        ({"type": "function", "function": {"name": "put"}}, "required", ["put"]),
        ({"type": "tool", "name": "put"}, "required", ["put"]),
        ({"type": "any"}, "required", ["add", "put"]),
        (allowed("auto", "put"), "auto", ["put"]),
        (allowed("required", "put", "add"), "required", ["add", "put"]),
    ],
)
def test_a_choice_is_read_in_all_its_usual_forms(choice: Any, mode: str, names: list[str]) -> None:
    read = ToolChoice.read(choice, (ADD, PUT))
    assert (read.mode, [tool.name for tool in read.tools]) == (mode, names)


def test_a_choice_that_names_no_tool_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"tool_choice is 'ad'.*\('add', 'put'\)"):
        ToolChoice.read("ad", (ADD, PUT))
    with pytest.raises(ConfigError, match="none were given"):
        ToolChoice.read("any", ())
    with pytest.raises(ConfigError, match=r"tool_choice is \{\}; use 'auto'"):
        ToolChoice.read({}, (ADD, PUT))
    with pytest.raises(ConfigError, match="tool_choice is 'function'"):
        ToolChoice.read({"type": "function", "function": "add"}, (ADD, PUT))


@pytest.mark.parametrize("wrong", [{"mode": "any"}, {"tools": []}, {"tools": [{"name": "nope"}]}, {"tools": "add"}])
def test_allowed_tools_are_some_of_those_given(wrong: dict[str, Any]) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {**allowed("auto", "add")["allowed_tools"], **wrong}}
    with pytest.raises(ConfigError, match="give .*'allowed_tools'.*'mode': 'auto' or 'required'"):
        ToolChoice.read(choice, (ADD, PUT))


def test_a_tool_whose_calls_cannot_be_checked_is_named() -> None:
    bad = Tool("oops", {"type": "object", "properties": {"n": {"type": "string", "pattern": "(?<=x)("}}})
    check = tool_constraint(FORM, [ADD, bad], on_unsupported="check")["constraint"].check
    with pytest.raises(GrammarError, match="parameters of 'oops'.*missing"):
        check(write(("oops", {"n": "x"})))
