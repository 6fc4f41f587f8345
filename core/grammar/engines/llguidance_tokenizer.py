"""llguidance's tokenizer of a vocabulary: its trie, and tries of the tokens that stay inside a string.

Building one takes 0.4 to 0.9 s for 128,000 tokens. llguidance's binding for Python keeps Python's lock meanwhile, so no
thread of the process would run. Its C interface, which the same library exports, does not. So a large tokenizer is
built there and then given to an object of the binding, which does everything else: matchers, masks, errors.

What the two hold is the same, and all that they hold: one pointer to a reference-counted `ParserFactory`
(`struct LLTokenizer` in python_ext/src/py.rs, `struct LlgTokenizer` in parser/src/ffi.rs). An object of the binding
that nobody knows yet and a handle of the C interface exchange their pointers, and the handle is freed with what the
object held. This is done for the versions whose sources say so, on the platform where it is tested, and where sizes
and reference counts are as they must be. Everything else takes the binding's own way.
"""

from __future__ import annotations

import _thread
import ctypes
import importlib.metadata
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from graftlm.core.grammar.engines.library import PerVocabulary
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

P = ParamSpec("P")
T = TypeVar("T")

KNOWN_VERSIONS = frozenset(
    ("1.5.0", "1.5.1", "1.6.0", "1.6.1", "1.7.0", "1.7.2", "1.7.3", "1.7.5", "1.7.6", "1.8.0", "1.9.0", "1.9.1")
)
"""Whose two structures and initialiser were read and found the same."""

MIN_TOKENS = 32_000
"""With fewer the lock is kept for less than a tenth of a second."""

# The trie holds 1,024 bytes of a token and 4 million nodes; before 1.7 more of them would end the process.
_MAX_TOKEN_BYTES, _MAX_NODES = 512, 3 << 20

_HEADER_BYTES = 16  # of a Python object: its reference count and its type
_SPECIAL = b"\xff"  # what marks a token that no text may contain

_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t
)
_callbacks: list[Any] = []  # for the life of the process: a matcher may outlive its vocabulary


class _Init(ctypes.Structure):
    """`LlgTokenizerInit` of parser/src/ffi.rs."""

    _fields_ = (
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_void_p),
        ("tokenizer_json", ctypes.c_void_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
    )


class _ByteTokenizer:
    """The tokenizer interface that llguidance's TokenizerWrapper expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = vocabulary.eos_token_ids
        self.tokens = vocabulary.tokens if ends else [*vocabulary.tokens, b""]
        self.eos_token_id = ends[0] if ends else vocabulary.vocab_size
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data]
        self._vocabulary = vocabulary

    def __call__(self, data: bytes | str) -> list[int]:
        return self._vocabulary.encode(data.encode() if isinstance(data, str) else data)


def builds_outside_lock(vocabulary: Vocabulary) -> bool:
    """Whether `tokenizer_of` lets other threads run while it builds the tokenizer of `vocabulary`."""
    return vocabulary.vocab_size >= MIN_TOKENS and _is_within_bounds(vocabulary) and _library() is not None


def outside_main_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what may tokenize. In the main thread a signal's handler may raise, and C code cannot take an exception.

    An interrupted caller leaves the call behind, which ends by itself and holds all that it needs.
    """
    if threading.get_ident() != threading.main_thread().ident or not _callbacks:
        return call(*args, **kwargs)
    results: list[T] = []
    errors: list[BaseException] = []
    running = _thread.allocate_lock()  # pools and conditions may be left locked by an interrupt

    def run() -> None:
        try:
            results.append(call(*args, **kwargs))
        except BaseException as error:
            errors.append(error)
        running.release()

    running.acquire()
    _thread.start_new_thread(run, ())
    running.acquire()
    for error in errors:
        raise error
    return results[0]


def _build(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if builds_outside_lock(vocabulary):
        built = build_outside_lock(vocabulary)
        if built is not None:
            return built
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer(vocabulary)))


tokenizer_of = PerVocabulary(_build)


def build_outside_lock(vocabulary: Vocabulary) -> LLTokenizer | None:
    """The tokenizer, built by way of the C interface; None where anything is not as it must be."""
    from llguidance import LLTokenizer

    library = _library()
    if library is None or not _is_within_bounds(vocabulary):
        return None
    given = _ByteTokenizer(vocabulary)
    tokens = [data or _SPECIAL for data in given.tokens]
    lengths = np.fromiter(map(len, tokens), np.uint32, len(tokens))
    data = b"".join(tokens)
    callback = _TOKENIZE(_tokenize_of(vocabulary))
    init = _Init(
        vocab_size=len(tokens),
        tok_eos=given.eos_token_id,
        token_lens=lengths.ctypes.data,
        token_bytes=ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p),
        tokenize_assumes_string=True,
        tokenize_fn=callback,
    )
    handle = library.llg_new_tokenizer(ctypes.byref(init), None, 0)
    if not handle:
        return None
    _callbacks.append(callback)
    built = LLTokenizer("byte", slices=[])
    exchanged = _exchange(built, handle)
    library.llg_free_tokenizer(handle)
    return built if exchanged and built.vocab_size == len(tokens) else None


def _exchange(built: LLTokenizer, handle: int) -> bool:
    """Swap what the two point to, if each is the only owner of it."""
    ours, theirs = (ctypes.c_void_p.from_address(address) for address in (id(built) + _HEADER_BYTES, handle))
    for pointer in (ours, theirs):
        if not pointer.value or pointer.value % ctypes.sizeof(ctypes.c_void_p):
            return False
        if tuple((ctypes.c_size_t * 2).from_address(pointer.value)) != (1, 1):  # strong and weak references
            return False
    ours.value, theirs.value = theirs.value, ours.value
    return True


def _tokenize_of(vocabulary: Vocabulary) -> Callable[[int | None, int, int, int | None, int], int]:
    """`LlgTokenizeFn`: the number of tokens of `size` bytes at `data`; as many as fit are written to `output`."""
    single = {token[0]: token_id for token_id, token in enumerate(vocabulary.tokens) if len(token) == 1}
    last: tuple[bytes, list[int]] = b"", []

    def tokenize(_: int | None, data: int, size: int, output: int | None, capacity: int) -> int:
        nonlocal last
        try:
            text = ctypes.string_at(data, size)
            known, ids = last  # it asks again where they do not fit
            if known != text:
                try:
                    ids = vocabulary.encode(text)
                except Exception:  # C code cannot take it: bytes are tokens as well
                    ids = [single[byte] for byte in text]
                last = text, ids
            fitting = np.array(ids[:capacity], np.uint32)
            if output and len(fitting):
                ctypes.memmove(output, fitting.ctypes.data, fitting.nbytes)
            return len(ids)
        except BaseException:
            return 0

    return tokenize


def _is_within_bounds(vocabulary: Vocabulary) -> bool:
    """Whether the trie takes it, and every text can be spelled."""
    tokens = vocabulary.tokens
    longest, total = max(map(len, tokens), default=0), sum(map(len, tokens))
    fits = longest <= _MAX_TOKEN_BYTES and total + len(tokens) <= _MAX_NODES
    return fits and bool(vocabulary.single_bytes.all())


@cache
def _library() -> ctypes.CDLL | None:
    """llguidance's library, if it is one whose layout is known."""
    from llguidance import LLTokenizer, _lib

    sizes = (object.__basicsize__, LLTokenizer.__basicsize__, LLTokenizer.__itemsize__, ctypes.sizeof(ctypes.c_void_p))
    if (
        sys.platform != "linux"
        or sys.implementation.name != "cpython"
        or sysconfig.get_config_var("Py_GIL_DISABLED")
        or sizes != (_HEADER_BYTES, _HEADER_BYTES + 8, 0, 8)
        or importlib.metadata.version("llguidance") not in KNOWN_VERSIONS
    ):
        return None
    library = ctypes.CDLL(_lib.__file__)
    try:
        library.llg_new_tokenizer.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
        library.llg_new_tokenizer.restype = ctypes.c_void_p
        library.llg_free_tokenizer.argtypes = (ctypes.c_void_p,)
        library.llg_free_tokenizer.restype = None
    except AttributeError:  # built without its C interface
        return None
    return library
