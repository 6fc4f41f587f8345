"""Program: a Python function that writes a text together with a model."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import reprlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, overload

from graftlm.core.config import SamplingParams, reject_unknown
from graftlm.core.errors import ConfigError
from graftlm.core.program.batch import Batch
from graftlm.core.program.interpreter import Backend
from graftlm.core.program.run import PartOrder, Run, current_run
from graftlm.core.program.state import ProgramState
from graftlm.core.request import Chunk
from graftlm.core.serving.stream import ChunkStream, StreamListener

if TYPE_CHECKING:
    from graftlm.core.program.compiler.plan import Plan
    from graftlm.core.program.compiler.reorder import CompileReport

_SAMPLING = tuple(f.name for f in fields(SamplingParams))
_default_runtime: Backend | None = None


def set_default_runtime(runtime: Backend | None) -> None:
    """Set the runtime of programs that are started without `runtime=`; None unsets it."""
    global _default_runtime
    _default_runtime = None if runtime is None else _checked(runtime)


def _checked(runtime: Any) -> Backend:
    if not callable(getattr(runtime, "submit_many", None)):
        raise ConfigError(f"runtime is {reprlib.repr(runtime)}; give a Runtime, such as gl.Runtime('sprout')")
    return runtime  # type: ignore[no-any-return]


class Program:
    """A function of a state and its own arguments, run on a runtime.

    Every way to run it takes the function's arguments by name or position, `runtime=`, and sampling parameters for
    each `gen` that does not set its own. Without `runtime=` a nested program uses its caller's runtime, any other
    program the default one. Missing and unknown arguments raise ConfigError.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        num_api_spec_tokens: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        bound: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        part_order: PartOrder | None = None,
        report: CompileReport | None = None,
    ) -> None:
        SamplingParams.from_options(**(sampling or {}))
        num = num_api_spec_tokens
        if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 1):
            raise ConfigError(f"num_api_spec_tokens is {num!r}; it must be a whole number, at least 1, or None")
        self.function = function
        self.num_api_spec_tokens = num_api_spec_tokens
        self.sampling = dict(sampling or {})
        self.bound = dict(bound or {})
        self._plan = plan
        self._part_order = part_order
        self.report = report  # of `compile`
        self._signature = inspect.signature(function)
        _check_signature(function, self._name, self._signature)
        functools.update_wrapper(self, function)

    def bind(self, **arguments: Any) -> Program:
        """Return a copy of the program with some arguments or sampling parameters set."""
        own, sampling = self._split(arguments)
        return self._derived(sampling=self.sampling | sampling, bound=self.bound | own)

    def run(self, *args: Any, runtime: Backend | None = None, **arguments: Any) -> ProgramState:
        """Start the program and return its state at once; reading from the state waits."""
        return self._start(self._prepare(args, arguments, runtime))

    __call__ = run

    def on(self, state: ProgramState, *args: Any, **arguments: Any) -> Any:
        """Run the program's code on the state of another program, here and now; return what its function returns.

        The state continues with what the program appends, and gets its variables.
        """
        own, sampling = self._split(arguments)
        if sampling or self.sampling:
            names = ", ".join(sampling or self.sampling)
            raise ConfigError(f"{self._name} runs on a state with that state's sampling; set {names} where it is run")
        if not isinstance(state, ProgramState):
            raise ConfigError(f"{state!r} is no state; call this inside a program, with its state")
        call = self._bind(args, own)
        return self.function(state, *call.args[1:], **call.kwargs)

    async def arun(self, *args: Any, runtime: Backend | None = None, **arguments: Any) -> ProgramState:
        """Run the program to its end without blocking the event loop. Cancelling the task cancels its model calls."""
        state = self.run(*args, runtime=runtime, **arguments)
        run = state._run
        try:
            await asyncio.wrap_future(run.when_done())
        except asyncio.CancelledError:
            run.cancel()
            raise
        return state

    def batch(
        self,
        items: Iterable[Mapping[str, Any]],
        *,
        runtime: Backend | None = None,
        max_concurrency: int = 256,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Run the program once per item (a dict of arguments) and wait for all; returns one state per item, in order.

        The common prefix of the items' first prompts is computed once. An item that fails has its error in its own
        state. At most `max_concurrency` items run Python code at the same time; model calls are not limited.
        """
        batch = self._batch(items, runtime, max_concurrency, sampling)
        try:
            batch.finish()
        except BaseException:
            batch.cancel()
            raise
        return batch.states

    async def abatch(
        self,
        items: Iterable[Mapping[str, Any]],
        *,
        runtime: Backend | None = None,
        max_concurrency: int = 256,
        **sampling: Any,
    ) -> list[ProgramState]:
        """Run `batch` without blocking the event loop. Cancelling the task cancels all model calls."""
        batch = self._batch(items, runtime, max_concurrency, sampling)
        try:
            await asyncio.wrap_future(batch.finishing())
        except asyncio.CancelledError:
            batch.cancel()
            raise
        return batch.states

    def stream(self, *args: Any, runtime: Backend | None = None, **arguments: Any) -> ProgramStream:
        """Run the program and iterate over the chunks that the model generates in it.

        Each Chunk has the `name` of its variable. An error of the program is raised at the end. Closing the iterator
        cancels the program's model calls.
        """
        listener = StreamListener()
        return ProgramStream(self._start_stream(listener, args, arguments, runtime), listener)

    async def astream(
        self, *args: Any, runtime: Backend | None = None, **arguments: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Run `stream` on any event loop."""
        listener = StreamListener(asyncio.get_running_loop())
        state = self._start_stream(listener, args, arguments, runtime)
        try:
            async for chunk in listener.chunks():
                yield chunk
        finally:
            if not listener.ended:
                state.cancel()

    # -- compiled ----------------------------------------------------------------------------------------------

    def plan(
        self, inputs: Iterable[Mapping[str, Any]], *, runtime: Backend | None = None, pool: int | None = None
    ) -> Plan:
        """Trace the program over sample inputs, without a model, and print the KV and the steps that it needs.

        The program's Python code runs once for each input, with stand-ins for the answers. `plan.program` is the
        program run by the plan: depth first where the KV of all branches does not fit into the pool, and with the KV
        of each branch given back when its last call has ended.

        pool  KV slots to plan for; None takes the runtime's
        """
        from graftlm.core.program.compiler.plan import make_plan

        made = make_plan(self, inputs, runtime, pool)
        print(made)
        return made

    def compile(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        reorder: Literal["suggest", "parts"] | Callable[[list[str]], Sequence[int]] = "suggest",
        agreement: float | None = None,
        runtime: Backend | None = None,
    ) -> Program:
        """Trace the program over sample inputs and order its prompts so that more of them is shared; print a report.

        reorder    "suggest" shows an order and its expected hit rate, and changes nothing. "parts" applies it among
                   texts that are declared with `gl.part`. A function gets the parts of each message and returns their
                   indices in another order
        agreement  least share of the inputs whose answers must stay equal under greedy decoding; below it the original
                   order stays. None: 0.95 for a function; "parts" then asks no model

        Returns: the program to run, with `report`. Raises: ConfigError where parts refer to each other by place.
        """
        from graftlm.core.program.compiler.reorder import compile_program

        made = compile_program(self, inputs, reorder, agreement, runtime)
        print(made.report)
        return made

    def _derived(self, **changes: Any) -> Program:
        """Return a copy with other constructor arguments."""
        return Program(self.function, **self._options | changes)

    @property
    def _options(self) -> dict[str, Any]:
        """The constructor's arguments after the function."""
        return {
            "num_api_spec_tokens": self.num_api_spec_tokens,
            "sampling": self.sampling,
            "bound": self.bound,
            "plan": self._plan,
            "part_order": self._part_order,
            "report": self.report,
        }

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a module's program by its name, and a bound program by its origin's name and its arguments."""
        name: str = getattr(self, "__qualname__", "")
        named: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            named = getattr(named, part, None)
        if named is self:
            return name
        decorated = isinstance(named, Program) and named.function is self.function
        return _rebuild, (named if decorated else self.function, self._options)

    # -- starting ----------------------------------------------------------------------------------------------

    def _prepare(
        self, args: tuple[Any, ...], arguments: Mapping[str, Any], runtime: Backend | None, **options: Any
    ) -> tuple[Run, Callable[[], Any]]:
        """Return a run that is ready to start, and the call of the program's function."""
        own, sampling = self._split(arguments)
        call = self._bind(args, own)
        run = self._run_of(runtime, sampling, **options)
        state = ProgramState(run.root)
        return run, lambda: self.function(state, *call.args[1:], **call.kwargs)

    def _run_of(self, runtime: Backend | None, sampling: Mapping[str, Any], **options: Any) -> Run:
        outer = current_run()
        given = None if runtime is None else _checked(runtime)
        backend = given or (outer.backend if outer is not None else None) or _default_runtime
        if backend is None:
            raise ConfigError(f"{self._name} has no runtime; pass runtime= or call set_default_runtime first")
        inherited = outer.num_api_spec_tokens if outer is not None else None
        defaults = self.sampling | dict(sampling)
        SamplingParams.from_options(**defaults)
        spec = self.num_api_spec_tokens or inherited
        if self._part_order is not None:
            options["part_order"] = self._part_order
        if self._plan is not None:
            options["pacing"] = self._plan.pacing
        return Run(backend, defaults=defaults, num_api_spec_tokens=spec, **options)

    def _start(self, prepared: tuple[Run, Callable[[], Any]]) -> ProgramState:
        run, function = prepared
        context = contextvars.copy_context()
        name = f"graftlm {self._name}"
        threading.Thread(target=context.run, args=(run.execute, function), name=name, daemon=True).start()
        return ProgramState(run.root)

    def _start_stream(
        self, listener: StreamListener, args: tuple[Any, ...], arguments: Mapping[str, Any], runtime: Backend | None
    ) -> ProgramState:
        run, function = self._prepare(args, arguments, runtime, on_chunk=listener.on_chunk)

        def on_done(_: object) -> None:
            error = run.raised or run.error
            if error is not None:
                listener.on_error(error)
            else:
                listener.on_finish(None)

        run.when_done().add_done_callback(on_done)
        return self._start((run, function))

    def _batch(
        self, items: Iterable[Any], runtime: Backend | None, max_concurrency: int, sampling: Mapping[str, Any]
    ) -> Batch:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {max_concurrency}; it must be at least 1")
        reject_unknown(list(sampling), _SAMPLING, "sampling parameter")

        def prepare(item: Any, **options: Any) -> tuple[Run, Callable[[], Any]]:
            if not isinstance(item, Mapping):
                raise ConfigError(f"an item of a batch is {item!r}; give a dict of the program's arguments")
            return self._prepare((), {**sampling, **item}, runtime, **options)

        return Batch(list(items), prepare, functools.partial(self._run_of, runtime, sampling), max_concurrency)

    # -- arguments ---------------------------------------------------------------------------------------------

    def _bind(self, args: tuple[Any, ...], own: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(None, *args, **(self.bound | own))
        except TypeError as error:
            raise ConfigError(f"{self._name}: {error}; it takes {', '.join(self._parameters) or 'none'}") from error

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", "program")

    @property
    def _parameters(self) -> list[str]:
        """The function's parameters without the state."""
        return list(self._signature.parameters)[1:]

    def _split(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separate the function's own arguments from sampling parameters."""
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._signature.parameters.values())
        own = {n: v for n, v in arguments.items() if n in self._parameters or (takes_any and n not in _SAMPLING)}
        sampling = {name: value for name, value in arguments.items() if name not in own}
        reject_unknown(list(sampling), [*_SAMPLING, *self._parameters], f"argument of {self._name}")
        return own, sampling


def _check_signature(function: Callable[..., Any], name: str, signature: inspect.Signature) -> None:
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise ConfigError(f"{name} takes no state; a program's first parameter is the state, usually `s`")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{name} is async; write a program as a plain function and await `arun`")
    if inspect.isgeneratorfunction(function):
        raise ConfigError(
            f"{name} yields, so calling it would run nothing; "
            "write to the state without yield, and read chunks from `stream`"
        )
    taken = {"runtime"} & set(list(signature.parameters)[1:])
    if taken:
        raise ConfigError(f"{name} has a parameter named 'runtime', which says where it runs; rename it")


def _rebuild(origin: Any, options: Mapping[str, Any]) -> Program:
    """Rebuild a program that `__reduce__` pickled."""
    return Program(origin.function if isinstance(origin, Program) else origin, **options)


class ProgramStream(ChunkStream):
    """The chunks of a program's model calls; `state` is the program's state."""

    def __init__(self, state: ProgramState, listener: StreamListener) -> None:
        super().__init__(listener, state.cancel, state._run.check_may_wait)
        self.state = state


@overload
def program(function: Callable[..., Any], /, *, num_api_spec_tokens: int | None = None, **sampling: Any) -> Program: ...
@overload
def program(*, num_api_spec_tokens: int | None = None, **sampling: Any) -> Callable[[Callable[..., Any]], Program]: ...
def program(
    function: Callable[..., Any] | None = None, /, *, num_api_spec_tokens: int | None = None, **sampling: Any
) -> Any:
    """Make a program from a function whose first parameter is the state.

    num_api_spec_tokens  API speculative execution on remote runtimes: one call of up to this many extra tokens may
                         answer several `gen`s.
    sampling             sampling parameters of each `gen` that does not set its own.
    """
    make = functools.partial(Program, num_api_spec_tokens=num_api_spec_tokens, sampling=sampling)
    return make if function is None else make(function)
