"""The engine under arbitrary sequences of operations and faults, checked after each of them.

The model is a sum over the KV store: the token that follows depends on every slot that its sequence holds. So a slot
that is written twice, freed too early or read by the wrong sequence changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from graftlm.core.config import CacheConfig, EngineConfig, SamplingParams
from graftlm.core.engine import LocalEngine
from graftlm.core.engine_builder import RunnerSpec
from graftlm.core.errors import GraftError, RequestCancelled, RequestTimeout, RequestTooLong
from graftlm.core.kv.tiers.block_copier import Arrival, BlockCopier, BlockLayout, Run
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS
from graftlm.core.kv.tiers.host_memory import HostRows
from graftlm.core.kv.tiers.loads import HostTier
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Chunk, Completion, Request, Submission
from graftlm.core.scheduling import step_loop
from graftlm.core.text.tokenizer import Tokenizer
from graftlm.kernels.wire_plan import WirePlan, slots_of
from tests.faults import InjectedExit, InjectedFault, failing
from tests.models import byte_tokenizer

NUM_SLOTS = 96
VOCAB_SIZE = 300
MODULUS = (1 << 31) - 1


def _kv(before: int, token: int) -> int:
    return (before * 31 + token * 7 + 3) % MODULUS


def _next_token(held: np.ndarray) -> int:
    return 97 + int(held.sum()) * 2654435761 % MODULUS % 26


class SummingRunner:
    """A model whose KV is one number a token, made from the token and the number before it."""

    def __init__(self) -> None:
        self.store = np.zeros(NUM_SLOTS, dtype=np.int64)

    def forward(self, plan: WirePlan) -> torch.Tensor:
        ids, out = plan.input_ids.tolist(), plan.out_slots.tolist()
        tokens = [0] * len(ids)
        for row in plan.rows:
            slots = slots_of(row.extents, 0, row.kv_len)
            assert slots[row.past :].tolist() == out[row.start : row.stop]
            for i in range(row.num_new):
                place = row.past + i
                before = int(self.store[slots[place - 1]]) if place else 0
                self.store[slots[place]] = _kv(before, ids[row.start + i])
                tokens[row.start + i] = _next_token(self.store[slots[: place + 1]])
        return self.logits(plan, tokens)

    def logits(self, plan: WirePlan, tokens: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(plan.logits_rows), VOCAB_SIZE)
        for i, query in enumerate(plan.logits_rows.tolist()):
            logits[i, tokens[query]] = 50.0
        return logits


class SlowCopier(BlockCopier):
    """A copier whose blocks arrive after three looks; their slots hold something else until then."""

    def load(self, runs: Sequence[Run], pieces: Sequence[torch.Tensor]) -> Arrival:
        return SlowArrival(lambda: super(SlowCopier, self).load(runs, pieces))


class SlowArrival(Arrival):
    def __init__(self, copy: Callable[[], Any]) -> None:
        super().__init__(None)
        self._copy, self._looks = copy, 3

    def done(self) -> bool:
        self._looks -= 1
        if self._looks == 0:
            self._copy()
        return self._looks <= 0

    def wait(self) -> None:
        if self._looks > 0:
            self._looks = 0
            self._copy()


def host_tier_of(runner: SummingRunner, num_blocks: int) -> HostTier:
    parts = [torch.from_numpy(runner.store)[:, None]]
    layout = BlockLayout(parts, BLOCK_TOKENS)
    return HostTier(SlowCopier(parts, layout), HostRows(num_blocks, layout.num_bytes, torch.device("cpu")))


@cache
def expected(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What the model answers greedily, one prompt alone."""
    held: list[int] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        for token in tokens[len(held) :]:
            held.append(_kv(held[-1] if held else 0, token))
        tokens.append(_next_token(np.array(held)))
    return tokens[len(prompt) :]


class Recorder:
    """A listener that keeps what it is told, and raises where it is asked to."""

    def __init__(self, raises: str = "") -> None:
        self.raises = raises
        self.ends: list[Completion | BaseException] = []
        self.streamed: list[int] = []

    def on_chunk(self, chunk: Chunk) -> None:
        self.streamed += chunk.token_ids
        if self.raises == "on_chunk":
            raise ValueError("a listener's own")

    def on_finish(self, completion: Completion) -> None:
        self.ends.append(completion)
        if self.raises == "on_finish":
            raise ValueError("a listener's own")

    def on_error(self, error: BaseException) -> None:
        self.ends.append(error)
        if self.raises == "on_error":
            raise ValueError("a listener's own")


class RaisingGrammar:
    """A grammar of somebody else whose matcher cannot be made."""

    def matcher(self) -> Any:
        raise ValueError("a plugin's own")


PROMPTS = st.tuples(
    st.sampled_from([(), (97,) * 9, (97,) * 9 + (98,) * 9]), st.integers(99, 101), st.integers(1, 12)
).map(lambda made: made[0] + (made[1],) * made[2])


class EngineMachine(RuleBasedStateMachine):
    """Requests come, run, end, fail and are cancelled in any order, on a pool that holds few of them."""

    submitted = Bundle("submitted")
    compiling = Bundle("compiling")

    @initialize(
        drafts=st.booleans(),
        page_size=st.sampled_from([1, 4]),
        eviction=st.sampled_from(["lru", "lfu"]),
        step=st.integers(4, 40),
        host_blocks=st.sampled_from([0, 0, 2, 40]),
    )
    def build(self, drafts: bool, page_size: int, eviction: Any, step: int, host_blocks: int) -> None:
        self.faults = ExitStack()
        self.now_s = 0.0
        config = EngineConfig(
            cache=CacheConfig(page_size=page_size, eviction=eviction),
            max_batch=6,
            max_step_tokens=step,
            jump_forward=False,
        )
        runner = SummingRunner()
        spec = RunnerSpec(
            runner,
            num_slots=NUM_SLOTS,
            max_model_len=NUM_SLOTS,
            vocab_size=VOCAB_SIZE,
            num_embeddings=VOCAB_SIZE,
            step_tokens=step,
            drafts=drafts,
            host_tier=host_tier_of(runner, host_blocks) if host_blocks else None,
        )
        tokenizer = Tokenizer.from_hf(byte_tokenizer())
        self.engine = LocalEngine(spec, tokenizer, config, clock=lambda: self.now_s)
        self.points: dict[str, Any] = {
            "forward": runner,
            "logits": runner,
            "sample": self.engine.sampler,
            "allocate": self.engine.cache.pool,
            "build_plan": step_loop,
            "detokenizer": tokenizer,
        }
        self.listeners: dict[int, tuple[Request, Recorder]] = {}
        self.cancelled: set[int] = set()
        self.broken: set[int] = set()  # whose own constraint fails

    def _submit(self, prompt: tuple[int, ...], listener: Recorder, grammar: Any = None, **options: Any) -> int:
        params = {key: options.pop(key) for key in ("max_tokens", "n", "timeout") if key in options}
        sampling = SamplingParams(temperature=0, ignore_eos=True, **params)
        request = Request(list(prompt), sampling, **options)
        given = PromptInput(np.array(prompt, dtype=np.int32))
        submission = Submission(request, listener, given, grammar, arrived_s=self.now_s)
        self.engine.add([submission])
        self.listeners[submission.id] = request, listener
        return submission.id

    @rule(
        target=submitted,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        stream=st.booleans(),
        raises=st.sampled_from(["", "", "", "on_chunk", "on_finish", "on_error"]),
    )
    def submit(self, prompt: tuple[int, ...], max_tokens: int, n: int, stream: bool, raises: str) -> int:
        return self._submit(prompt, Recorder(raises), max_tokens=max_tokens, n=n, stream=stream)

    @rule(target=submitted, prompt=PROMPTS, timeout=st.floats(0.5, 5))
    def submit_with_a_deadline(self, prompt: tuple[int, ...], timeout: float) -> int:
        return self._submit(prompt, Recorder(), max_tokens=20, timeout=timeout)

    @rule(target=submitted, prompt=PROMPTS, num=st.integers(1, 8))
    def score(self, prompt: tuple[int, ...], num: int) -> int:
        return self._submit(prompt, Recorder(), score_ids=[100] * num)

    @rule(target=submitted, prompt=PROMPTS)
    def pin(self, prompt: tuple[int, ...]) -> int:
        return self._submit(prompt, Recorder(), want_logits=True, pin=True)

    @rule(target=submitted, prompt=PROMPTS)
    def submit_what_can_never_fit(self, prompt: tuple[int, ...]) -> int:
        return self._submit(prompt * 100, Recorder(), max_tokens=4)

    @rule(target=submitted, prompt=PROMPTS)
    def submit_with_a_matcher_that_raises(self, prompt: tuple[int, ...]) -> int:
        grammar: Future[Any] = Future()
        grammar.set_result(RaisingGrammar())
        submission = self._submit(prompt, Recorder(), grammar)
        self.broken.add(submission)
        return submission

    @rule(target=compiling, prompt=PROMPTS)
    def submit_with_a_constraint_that_compiles(self, prompt: tuple[int, ...]) -> Future[Any]:
        grammar: Future[Any] = Future()
        self.broken.add(self._submit(prompt, Recorder(), grammar))
        return grammar

    @rule(grammar=consumes(compiling))
    def let_a_compilation_fail(self, grammar: Future[Any]) -> None:
        grammar.set_exception(ValueError("cannot be compiled"))

    @rule(num=st.integers(1, 12))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.engine.step()

    @rule(submission=submitted)
    def cancel(self, submission: int) -> None:
        self.engine.cancel(submission)
        self.cancelled.add(submission)

    @rule(seconds=st.floats(0.1, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        point=st.sampled_from(["forward", "logits", "sample", "allocate", "build_plan", "detokenizer"]),
        nth=st.integers(1, 5),
        kind=st.sampled_from([InjectedFault, InjectedExit]),
    )
    def let_fail(self, point: str, nth: int, kind: type[BaseException]) -> None:
        """The step fails before it has written KV, after it, or when its tokens are sampled; or a part beside it."""
        self.faults.enter_context(failing(self.points[point], point, every=nth, once=True, kind=kind))

    @rule()
    def clear_cache(self) -> None:
        self.engine.clear_cache()

    @rule()
    def unpin(self) -> None:
        for _, listener in self.listeners.values():
            for end in listener.ends:
                if isinstance(end, Completion) and end.pin is not None:
                    self.engine.unpin(end.pin)

    @rule()
    def fail_all(self) -> None:
        self.engine.fail_all(GraftError("closed"))
        assert all(listener.ends for _, listener in self.listeners.values())

    @precondition(lambda self: hasattr(self, "engine"))
    @invariant()
    def slots_are_owned_once(self) -> None:
        self.engine.check_integrity()

    @precondition(lambda self: hasattr(self, "engine"))
    @invariant()
    def each_request_ends_at_most_once_and_rightly(self) -> None:
        for submission, (request, listener) in self.listeners.items():
            assert len(listener.ends) <= 1
            for end in listener.ends:
                self._check(submission, request, listener, end)

    def _check(self, submission: int, request: Request, listener: Recorder, end: Completion | BaseException) -> None:
        if not isinstance(end, Completion):
            self._check_cause(submission, request, end)
            return
        if request.score_ids or request.want_logits:
            return
        right = expected(tuple(request.prompt), request.sampling.max_tokens or 0)
        for done in end.completions or [end]:
            if end.finish_reason == "cancelled":
                assert submission in self.cancelled
                assert done.token_ids == right[: len(done.token_ids)]
            else:
                assert done.token_ids == right

    def _check_cause(self, submission: int, request: Request, error: BaseException) -> None:
        """Each error is one that the machine gave a reason for."""
        if isinstance(error, RequestTooLong):
            assert len(request.prompt) > NUM_SLOTS - 20
        elif isinstance(error, RequestTimeout):
            assert request.sampling.timeout is not None
        elif isinstance(error, RequestCancelled):
            assert submission in self.cancelled
        else:
            planted = isinstance(error.__cause__, InjectedFault | InjectedExit) or str(error) in (
                "closed",
                "a listener's own",
            )
            assert planted or submission in self.broken, repr(error)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.faults.close()
        for submission, (request, listener) in self.listeners.items():
            if not listener.ends and request.sampling.max_tokens == 256:  # its constraint never compiles
                self.engine.cancel(submission)
        for _ in range(3000):
            if self.engine.idle:
                break
            self.engine.step()
        assert self.engine.idle
        assert all(len(listener.ends) == 1 for _, listener in self.listeners.values())
        self.engine.check_integrity()
        assert self.engine.cache.num_in_use == 0


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=60)
