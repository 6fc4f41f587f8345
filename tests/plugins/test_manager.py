"""The seams: what plugins offer, and what happens when one is broken."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from graftlm.core.errors import PluginError
from graftlm.core.request import Completion, Request, Usage
from graftlm.plugins import builtin, manager
from graftlm.plugins.hookspecs import hookimpl


def plugin(**hooks: Callable[..., Any]) -> ModuleType:
    """A plugin module with these hooks."""
    module = ModuleType("plugin")
    vars(module).update({name: hookimpl(hook) for name, hook in hooks.items()})
    return module


def offering(name: str, factory: Any = dict, kind: str = "attention") -> ModuleType:
    return plugin(**{f"graftlm_register_{kind}": lambda register: register(name, factory)})


def entry_point(monkeypatch: pytest.MonkeyPatch, name: str, module: object) -> EntryPoint:
    """An entry point of the group that loads `module`."""
    home = ModuleType(f"{name}_home")
    vars(home)["plugin"] = module
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return EntryPoint(name, f"{home.__name__}:plugin", manager.GROUP)


def test_a_factory_given_as_text_is_imported_when_its_name_is_used() -> None:
    registry = manager.Registry()
    registry.add("acme", offering("acme", "collections:OrderedDict"))
    assert list(registry.attention) == ["acme"]
    assert registry.attention["acme"]().popitem is not None


def test_an_unknown_name_lists_the_known_ones() -> None:
    registry = manager.Registry()
    registry.add("acme", offering("acme"))
    with pytest.raises(PluginError, match="no plugin offers attention 'triton'; known: acme"):
        registry.attention["triton"]


def test_a_name_offered_twice_names_both_plugins() -> None:
    registry = manager.Registry()
    registry.add("first", offering("fast"))
    with pytest.raises(PluginError, match="attention 'fast' is offered by both 'first' and 'second'"):
        registry.add("second", offering("fast"))


def test_one_name_may_be_offered_for_two_kinds() -> None:
    registry = manager.Registry()
    registry.add("first", offering("fast", kind="attention"))
    registry.add("second", offering("fast", kind="grammars"))
    assert "fast" in registry.attention
    assert "fast" in registry.grammars


def test_a_plugin_that_fails_half_way_offers_nothing() -> None:
    def register_attention(register: Any) -> None:
        register("good", dict)
        raise RuntimeError("no such device")

    registry = manager.Registry()
    with pytest.raises(PluginError, match="plugin 'acme' is broken: RuntimeError: no such device"):
        registry.add("acme", plugin(graftlm_register_attention=register_attention))
    assert len(registry.attention) == 0


def test_an_unknown_hook_is_an_error_that_names_it() -> None:
    with pytest.raises(PluginError, match="graftlm_register_tokenizers"):
        manager.Registry().add("acme", plugin(graftlm_register_tokenizers=lambda register: None))


@pytest.mark.parametrize("name", ["Fast", "", "fast one"])
def test_a_misshapen_name_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match="lower-case"):
        manager.Registry().add("acme", offering(name))


@pytest.mark.parametrize("factory", ["acme", "acme:", 3])
def test_a_factory_that_is_neither_callable_nor_a_path_is_refused(factory: object) -> None:
    with pytest.raises(PluginError, match="package.module:attribute"):
        manager.Registry().add("acme", offering("fast", factory))


def test_a_factory_that_cannot_be_imported_says_where_from() -> None:
    registry = manager.Registry()
    registry.add("acme", offering("fast", "acme_is_not_installed:Fast"))
    with pytest.raises(PluginError, match="'fast' of plugin 'acme' cannot be loaded from 'acme_is_not_installed:Fast'"):
        registry.attention["fast"]


@pytest.mark.parametrize(
    ("kind", "factory", "argument"),
    [
        ("engines", lambda model, config, tokenizer: None, "'wake'"),
        ("grammars", lambda spec, vocabulary: None, r"spec, vocabulary, options\): too many positional"),
        ("attention", lambda store, device: None, "'device'"),
        ("models", lambda model, config: None, r"model, config, tokenizer\): too many positional"),
    ],
)
def test_a_factory_that_takes_other_arguments_is_named_with_them(kind: str, factory: Any, argument: str) -> None:
    registry = manager.Registry()
    registry.add("acme", offering("fast", factory, kind))
    with pytest.raises(PluginError, match=f"{kind} 'fast' of plugin 'acme' is called as factory.*{argument}"):
        registry.kinds[kind]["fast"]  # type: ignore[index]


def test_a_hook_with_an_argument_that_does_not_exist_is_named_with_it() -> None:
    with pytest.raises(PluginError, match="Argument.*'regster'.*declared in the hookimpl"):
        manager.Registry().add("acme", plugin(graftlm_register_engines=lambda regster: None))


def test_a_wrong_call_of_register_names_the_argument() -> None:
    def register_engines(register: Any) -> None:
        register("fast", dict, about="quick")

    with pytest.raises(PluginError, match=r"'acme' is broken: TypeError: .*unexpected keyword argument 'about'"):
        manager.Registry().add("acme", plugin(graftlm_register_engines=register_engines))


def test_a_broken_plugin_is_listed_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = EntryPoint("broken", "no_such_module", manager.GROUP)
    registry = manager.build([broken, entry_point(monkeypatch, "acme", offering("acme"))])
    assert "acme" in registry.attention
    assert {p.name: p.error for p in registry.plugins} == {
        "graftlm": None,
        "broken": "ModuleNotFoundError: No module named 'no_such_module'",
        "acme": None,
    }
    assert "plugin 'broken'" in caplog.text


def test_a_plugin_cannot_take_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = manager.build([entry_point(monkeypatch, "acme", offering("torch"))])
    assert "offered by both 'graftlm' and 'acme'" in (registry.plugins[-1].error or "")
    assert registry.attention.by_name["torch"].plugin == "graftlm"


def test_a_removed_plugin_leaves_nothing_behind() -> None:
    registry = manager.Registry()
    registry.add("acme", offering("fast"))
    registry.remove("acme")
    assert len(registry.attention) == 0
    registry.add("acme", offering("fast"))
    with pytest.raises(PluginError, match="no plugin 'other' is loaded; loaded: acme"):
        registry.remove("other")


def points(*names: str) -> list[EntryPoint]:
    return [EntryPoint(name, name, manager.GROUP) for name in names]


def test_all_installed_plugins_are_wanted_by_default() -> None:
    assert manager.wanted(points("a", "b"), None) == points("a", "b")


def test_an_empty_choice_wants_none() -> None:
    assert manager.wanted(points("a", "b"), "") == []


def test_a_choice_names_the_plugins_in_order() -> None:
    assert manager.wanted(points("a", "b", "c"), " c, a") == points("c", "a")


def test_a_chosen_plugin_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(PluginError, match="'d', which is not installed; installed: a, b"):
        manager.wanted(points("a", "b"), "a,d")


def test_every_observer_hears_of_a_finished_request_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def failing(request: Request, completion: Completion) -> None:
        raise RuntimeError("full disk")

    registry = manager.Registry()
    registry.add("listening", plugin(graftlm_request_finished=lambda completion: heard.append(completion.text)))
    registry.add("failing", plugin(graftlm_request_finished=failing))
    with caplog.at_level(logging.ERROR):
        registry.request_finished(Request("hi"), Completion("hello", [7], "stop", Usage(1, 0, 1)))
    assert heard == ["hello"]
    assert "full disk" in caplog.text


def test_every_built_in_can_be_imported_or_names_what_is_missing() -> None:
    registry = manager.Registry()
    for offer in registry.add("graftlm", builtin).offers:
        if offer.name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
            with pytest.raises(PluginError, match="No module named 'flashinfer'; install what it needs"):
                offer.resolve()
        else:
            assert callable(offer.resolve()), offer.name


def test_listing_the_built_ins_imports_nothing_heavy() -> None:
    code = "import sys; from graftlm.plugins import manager; manager.load(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
