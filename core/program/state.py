"""ProgramState: the text and the variables of a program, appended to and read from."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import ConfigError
from graftlm.core.program.expression import (
    Expression,
    Hold,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    as_expression,
    assistant,
    system,
    user,
)

if TYPE_CHECKING:
    from graftlm.core.program.branch import Branch, Variable
    from graftlm.core.program.run import Run
    from graftlm.core.program.select import Selection
    from graftlm.core.request import Completion, Usage

Item = Expression | str


class ProgramState:
    """The growing text of a program, and its variables.

    `state += expression` returns at once. Reading a variable, the text or the messages blocks until they are complete,
    and raises the error that prevents them. From outside the program a read also waits until the program has defined
    the variable.
    """

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    @property
    def _run(self) -> Run:
        return self._branch.run

    # -- appending ---------------------------------------------------------------------------------------------

    def __iadd__(self, item: Item) -> ProgramState:
        self._branch.append(as_expression(item))
        return self

    def system(self, content: Item | None = None) -> AbstractContextManager[None]:
        """Append a system turn; without content, use as `with state.system():`."""
        return self._turn("system", system, content)

    def user(self, content: Item | None = None) -> AbstractContextManager[None]:
        """Append a user turn; without content, use as `with state.user():`."""
        return self._turn("user", user, content)

    def assistant(self, content: Item | None = None) -> AbstractContextManager[None]:
        """Append an assistant turn; without content, use as `with state.assistant():`."""
        return self._turn("assistant", assistant, content)

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Store the text that is appended inside the `with` block in variable `name`."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a scope is {name!r}; give non-empty text")
        return self._between(ScopeBegin(name), ScopeEnd(name))

    def fork(self, num_branches: int = 1) -> ForkGroup:
        """Fork into branches that continue from here independently and concurrently; returns at once."""
        if not isinstance(num_branches, int) or num_branches < 1:
            raise ConfigError(f"fork({num_branches!r}): the number of branches must be at least 1")
        return ForkGroup(self, [ProgramState(child) for child in self._branch.fork(num_branches)])

    def hold(self, seconds: float | None = None, *, label: str = "") -> HeldState:
        """Say that the program is busy elsewhere, for example in a tool, and goes on from here after `seconds`.

        The KV of the text so far is kept where it is cheapest meanwhile; see `Runtime.hold`. It ends with the next
        model call of this state, with `release()` of the result, or with its `with` block.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise ConfigError(f"hold({seconds!r}): give the expected pause in seconds, above 0, or None")
        self._branch.append(Hold(seconds, label))
        return HeldState(self._branch)

    def set(self, name: str, value: Any) -> None:
        """Set a variable to a value."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a variable is {name!r}; give non-empty text")
        variable: Variable = Future()
        variable.set_result(value)
        self._branch.define(name, variable)

    __setitem__ = set

    def _turn(
        self, role: str, build: Callable[[Item], Expression], content: Item | None
    ) -> AbstractContextManager[None]:
        if content is None:
            return self._between(RoleBegin(role), RoleEnd(role))
        self._branch.append(build(content))
        return _nothing()

    @contextmanager
    def _between(self, begin: Expression, end: Expression) -> Generator[None]:
        self._branch.append(begin)
        try:
            yield
        finally:
            self._branch.append(end)

    # -- reading -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        branch, run = self._branch, self._run
        inside = run.inside()
        run.wait_for(
            lambda: name in branch.variables or branch.error is not None or inside or run.returned, f"state[{name!r}]"
        )
        if name in branch.variables:
            variable = branch.variables[name]
            if not variable.done():
                run.check_may_wait(f"state[{name!r}]")
            return variable.result()
        error = branch.error or (None if inside else run.raised)
        if error is not None:
            raise error
        known = ", ".join(sorted(branch.variables)) or "none"
        raise KeyError(f"the program defines no variable {name!r}; known: {known}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a variable's value, or `default` if the program does not define it."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: str) -> bool:
        """Return True if the variable is defined yet; does not wait."""
        with self._run.changed:
            return name in self._branch.variables

    @property
    def variables(self) -> dict[str, Any]:
        """All variables and their values. Waits for the end."""
        self.wait()
        return {name: self[name] for name in list(self._branch.variables)}

    @property
    def text(self) -> str:
        """The whole text so far, as the model sees it, with its chat template."""
        self._settled()
        return self._branch.text

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns so far, as {"role", "content"}; text outside turns is not included."""
        self._settled()
        return self._branch.messages

    @property
    def error(self) -> BaseException | None:
        """The first error of this state, the program's Python code or a branch, or None. Waits for the end."""
        self.wait()
        if self._branch.error is not None or self._branch.parent is not None:
            return self._branch.error
        return self._run.raised or self._run.error

    @property
    def usage(self) -> Usage:
        """Tokens of all model calls of this state and of branches forked from it. Waits for the end."""
        self.wait()
        return self._branch.usage

    @property
    def result(self) -> Any:
        """The return value of the program's function; raises what it raised. Only from outside the program."""
        if self._run.inside():
            raise ConfigError("a program cannot read its own result; read it where the program was started")
        self._run.wait_for(lambda: self._run.returned, "state.result")
        if self._run.raised is not None:
            raise self._run.raised
        return self._run.result

    def details(self, name: str) -> Completion | Selection:
        """Return the Completion of a `gen` or the Selection of a `select`."""
        self[name]
        found = self._branch.details.get(name)
        if found is None:
            raise KeyError(f"variable {name!r} was neither generated nor selected here")
        return found

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is executed; return False after `timeout` seconds.

        Inside the program: everything appended so far to this state and to its forks. From outside also
        everything that the program appends later.
        """
        run = self._run
        inside = run.inside()
        return run.wait_for(lambda: self._branch.num_busy == 0 and (inside or run.returned), "state.wait()", timeout)

    def cancel(self) -> None:
        """Cancel the program's model calls and free their KV; readers get RequestCancelled."""
        self._run.cancel()

    def _settled(self) -> None:
        """Wait until the text is complete; raise the error that prevents it."""
        branch, run = self._branch, self._run
        inside = run.inside()
        run.wait_for(lambda: not branch.busy and (inside or run.returned), "state.text")
        error = branch.error or (run.raised if branch.parent is None and not inside else None)
        if error is not None:
            raise error

    def __repr__(self) -> str:
        branch = self._branch
        doing = "failed" if branch.error is not None else "busy" if branch.busy else "idle"
        return (
            f"ProgramState({doing}, {len(branch.text)} characters, variables: {', '.join(branch.variables) or 'none'})"
        )


class HeldState:
    """The KV of a state that waits, see `ProgramState.hold`."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def release(self) -> None:
        """End the hold: the KV is evicted as any other."""
        self._branch.append(Hold(None, ends=True))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.release()


class ForkGroup(Sequence[ProgramState]):
    """The branches of one fork."""

    def __init__(self, parent: ProgramState, states: list[ProgramState]) -> None:
        self._parent = parent
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, key: Any) -> Any:
        """Return a branch by its number, or by a variable's name the list of its values in all branches."""
        if isinstance(key, str):
            return [state[key] for state in self._states]
        return self._states[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept the branch that `group[i] += item` assigns after appending to it."""
        if not isinstance(key, int) or value is not self._states[key]:
            raise ConfigError(f"group[{key!r}] cannot be set: branches stay those of the fork; append with +=")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(self, item: Item | Sequence[Item] | Callable[[int], Item]) -> ForkGroup:
        """Append to every branch: one expression, a list with one for each, or a function of the branch's number."""
        if isinstance(item, Expression | str):
            items: Sequence[Item] = [item] * len(self)
        elif callable(item):
            items = [item(i) for i in range(len(self))]
        else:
            items = list(item)
        if len(items) != len(self):
            raise ConfigError(f"{len(items)} expressions for {len(self)} branches; give one for each")
        for state, one in zip(self._states, items, strict=True):
            state += one
        return self

    def join(self) -> None:
        """Wait for the branches, and store each of their new variables as a list in the state that was forked.

        The list has None for a branch that does not define the variable. If a branch failed, reading the list raises
        its error.
        """
        for state in self._states:
            state._branch.wait()
        names = {name: None for state in self._states for name in state._branch.own_variables}
        for name in names:
            self._parent._branch.define(name, self._gathered(name))

    def _gathered(self, name: str) -> Variable:
        values: list[Any] = []
        gathered: Variable = Future()
        for state in self._states:
            branch = state._branch
            variable = branch.variables.get(name)
            error = branch.error if variable is None else variable.exception()
            if error is not None:
                gathered.set_exception(error)
                return gathered
            values.append(None if variable is None else variable.result())
        gathered.set_result(values)
        return gathered


@contextmanager
def _nothing() -> Generator[None]:
    yield
