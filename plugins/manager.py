"""Find plugins and collect their factories; a broken plugin is logged and skipped."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

import pluggy

from graftlm.core.errors import PluginError
from graftlm.plugins import builtin, hookspecs
from graftlm.plugins.hookspecs import CALLS, Factory, Kind

if TYPE_CHECKING:
    from graftlm.core.request import Completion, Request

GROUP = "graftlm"
BUILTIN = "graftlm"
KINDS: tuple[Kind, ...] = get_args(Kind)

log = logging.getLogger("graftlm.plugins")


@dataclass(frozen=True)
class Offer:
    """One name that a plugin registers, imported when it is first used."""

    kind: Kind
    name: str
    factory: Factory | str
    plugin: str
    description: str = ""

    def resolve(self) -> Factory:
        """Import and return the factory; raise PluginError if that fails or its signature does not fit its kind."""
        factory = self._imported() if isinstance(self.factory, str) else self.factory
        self._check_call(factory)
        return factory

    def _imported(self) -> Factory:
        assert isinstance(self.factory, str)
        module, _, attribute = self.factory.partition(":")
        try:
            factory: Factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"{self.kind} {self.name!r} of plugin {self.plugin!r} cannot be loaded from {self.factory!r}: {error}; "
                f"install what it needs or choose another name"
            ) from error
        return factory

    def _check_call(self, factory: Factory) -> None:
        arguments = CALLS[self.kind]
        given, _, by_keyword = (part.replace(",", " ").split() for part in arguments.partition("*"))
        try:
            inspect.signature(factory).bind(*given, **dict.fromkeys(by_keyword))
        except ValueError:
            return  # callables in C may have no signature to check
        except TypeError as error:
            raise PluginError(
                f"{self.kind} {self.name!r} of plugin {self.plugin!r} is called as factory({arguments}): {error}; "
                "take these arguments"
            ) from error


@dataclass
class Plugin:
    """One plugin and its status: `error` is the reason why it is disabled, None if it is enabled."""

    name: str
    source: str
    offers: list[Offer] = field(default_factory=list)
    error: str | None = None


class Offers(Mapping[str, Factory]):
    """The names of one kind, each with its plugin. A lookup imports the factory."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.by_name: dict[str, Offer] = {}

    def __getitem__(self, name: str) -> Factory:
        """Return the factory called `name`; raise PluginError, listing the known names, if there is none."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise PluginError(f"no plugin offers {self.kind} {name!r}; known: {known}")
        return self.by_name[name].resolve()

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)


class Registry:
    """The factories of all loaded plugins.

    `registry.attention["torch"]` is a factory; `registry.attention` lists the names.
    """

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []
        self.kinds: Mapping[Kind, Offers] = MappingProxyType({kind: Offers(kind) for kind in KINDS})
        self._hooks = pluggy.PluginManager(GROUP)
        self._hooks.add_hookspecs(hookspecs)

    @property
    def engines(self) -> Offers:
        return self.kinds["engines"]

    @property
    def grammars(self) -> Offers:
        return self.kinds["grammars"]

    @property
    def attention(self) -> Offers:
        return self.kinds["attention"]

    @property
    def models(self) -> Offers:
        return self.kinds["models"]

    def add(self, name: str, module: object, source: str = "") -> Plugin:
        """Add one plugin with all of its factories, or none of them.

        Raises: PluginError if a hook fails, is unknown or malformed, or a name is taken.
        """
        plugin = Plugin(name, source)
        try:
            self._hooks.register(module, name)
            self._hooks.check_pending()
            offers = self._collect(plugin, module)
        except PluginError:
            self._forget(name)
            raise
        except Exception as error:
            self._forget(name)
            raise PluginError(
                f"plugin {name!r} is broken: {type(error).__name__}: {error}; uninstall or mend it"
            ) from error
        for offer in offers:
            self.kinds[offer.kind].by_name[offer.name] = offer
        plugin.offers = offers
        self.plugins.append(plugin)
        return plugin

    def remove(self, name: str) -> None:
        """Remove a plugin with all of its factories; raise PluginError if there is none of that name."""
        plugin = next((p for p in self.plugins if p.name == name), None)
        if plugin is None:
            raise PluginError(f"no plugin {name!r} is loaded; loaded: {', '.join(p.name for p in self.plugins)}")
        for offer in plugin.offers:
            del self.kinds[offer.kind].by_name[offer.name]
        self.plugins.remove(plugin)
        self._forget(name)

    def _collect(self, plugin: Plugin, module: object) -> list[Offer]:
        """Call the plugin's registering hooks; return its factories without adding them."""
        offers: list[Offer] = []
        others = [m for m in self._hooks.get_plugins() if m is not module]
        for kind in KINDS:
            names = dict(self.kinds[kind].by_name)

            def register(
                name: str,
                factory: Factory | str,
                description: str = "",
                *,
                kind: Kind = kind,
                names: dict[str, Offer] = names,
            ) -> None:
                offer = Offer(kind, name, factory, plugin.name, description)
                _check(offer, taken=names.get(name))
                names[name] = offer
                offers.append(offer)

            self._hooks.subset_hook_caller(f"graftlm_register_{kind}", others)(register=register)
        return offers

    def _forget(self, name: str) -> None:
        if self._hooks.has_plugin(name):
            self._hooks.unregister(name=name)

    def request_finished(self, request: Request, completion: Completion) -> None:
        """Notify every observer; an error in one is logged and does not affect the rest."""
        for observer in self._hooks.hook.graftlm_request_finished.get_hookimpls():
            arguments = {"request": request, "completion": completion}
            try:
                observer.function(*(arguments[name] for name in observer.argnames))
            except BaseException:  # Rust code panics with one
                log.exception("observer of plugin %r failed on request %s", observer.plugin_name, request.id)


def _check(offer: Offer, taken: Offer | None) -> None:
    """Raise a PluginError if the offer is malformed, or naming both plugins if its name is taken."""
    name, factory = offer.name, offer.factory
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise PluginError(
            f"plugin {offer.plugin!r} offers the name {name!r}; use lower-case letters, digits, '.', '_', '-'"
        )
    if not callable(factory) and not (isinstance(factory, str) and re.fullmatch(r"[\w.]+:\w+", factory)):
        raise PluginError(
            f"plugin {offer.plugin!r} offers {name!r} as {factory!r}; "
            f"give a callable or the text 'package.module:attribute'"
        )
    if taken:
        raise PluginError(
            f"{offer.kind} {name!r} is offered by both {taken.plugin!r} and {offer.plugin!r}; "
            f"uninstall one of them, or list the plugins to load in GRAFTLM_PLUGINS"
        )


def installed() -> list[metadata.EntryPoint]:
    """Return the entry points that installed packages put into the group `graftlm`, by name."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name)


def wanted(points: Iterable[metadata.EntryPoint], choice: str | None) -> list[metadata.EntryPoint]:
    """Return the `points` that GRAFTLM_PLUGINS=`choice` enables: all if unset, none if empty, else the named ones.

    Raises: PluginError for a name that is not installed.
    """
    points = list(points)
    if choice is None:
        return points
    names = [name for part in choice.split(",") if (name := part.strip())]
    known = {point.name: point for point in points}
    for name in names:
        if name not in known:
            raise PluginError(
                f"GRAFTLM_PLUGINS names the plugin {name!r}, which is not installed; "
                f"installed: {', '.join(known) or 'none'}"
            )
    return [known[name] for name in names]


def build(points: Iterable[metadata.EntryPoint]) -> Registry:
    """Build the registry of the built-ins and then `points`, in order; a broken plugin is logged and disabled."""
    registry = Registry()
    registry.add(BUILTIN, builtin, source="comes with graftlm")
    for point in points:
        source = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            registry.add(point.name, point.load(), source)
        except Exception as error:
            message = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            log.warning("plugin %r (%s) is left out: %s", point.name, source, message)
            registry.plugins.append(Plugin(point.name, source, error=message))
    return registry


@functools.cache
def load() -> Registry:
    """Return the registry of this process, built on the first call from the plugins that GRAFTLM_PLUGINS enables."""
    return build(wanted(installed(), os.environ.get("GRAFTLM_PLUGINS")))
