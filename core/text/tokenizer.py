"""Text to token ids and back: prompts, chat templates, continuations."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.chat.messages import Message, to_messages, to_template_dicts
from graftlm.core.chat.thinking import ThoughtPlace
from graftlm.core.errors import ConfigError, GraftError, ModelError, RequestTooLong, failure_of, shortened
from graftlm.core.hub import only_local, why_not
from graftlm.core.model.transformers_lock import importing_transformers
from graftlm.core.text import render_limit
from graftlm.core.text.batch_encoder import BLOCK_CHARS, LONG_CHARS, BatchEncoder
from graftlm.core.text.detokenizer import Detokenizer
from graftlm.core.text.plain_tokenizer import KnownTokenizer, PlainTokenizer
from graftlm.core.text.token_bytes import SPACE_MARK, byte_table, table_is_exact

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.media.processor import MediaProcessor


GENERATION_FILE = "generation_config.json"
_MOST_IDS = 2**31


def ends_of(given: Any) -> list[int]:
    """Return the ids in `eos_token_id` of a generation configuration; -1 stands for none.

    Raises: ModelError for a value that is no id and no list of ids.
    """
    values = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < _MOST_IDS:
            raise ModelError(
                f"{GENERATION_FILE} has eos_token_id {shortened(given)}; give a token id, or a list of ids"
            )
    return [value for value in values if value >= 0]


def check_templates(folder: str) -> None:
    """Raise ModelError if a chat template of a local folder is a link to a file outside of it.

    Links into the blobs of Hugging Face's cache, where the files of a snapshot lie, are followed.
    """
    root = Path(folder)
    if not root.is_dir():
        return
    inside = [root.resolve()]
    if root.resolve().parent.name == "snapshots":
        inside.append(root.resolve().parents[1] / "blobs")
    for path in (*root.glob("*.jinja"), *root.glob("additional_chat_templates/*.jinja")):
        if not any(path.resolve().is_relative_to(allowed) for allowed in inside):
            raise ModelError(
                f"the chat template {str(path)!r} is a link out of its folder, to {str(path.resolve())!r}; copy the "
                "template into the folder"
            )


class Tokenizer:
    """A Hugging Face tokenizer and what the runtime needs beside it.

    eos_token_ids  every id that ends an answer: the tokenizer's own and those of the generation config.
    model_name     the model's name in errors
    media          puts pictures and videos into prompts; None for a model that reads text only
    derived        objects that other modules derive once, by their class, or by it and its arguments. They may refer to
                   the tokenizer and are freed with it, which the values of a WeakKeyDictionary would prevent
    """

    model_name = "the model"
    media: MediaProcessor | None = None

    def __init__(self, hf: Any, *, eos_token_ids: Iterable[int] = ()) -> None:
        self.hf = hf
        self.derived: dict[Any, Any] = {}
        own = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *(int(i) for i in eos_token_ids)]))
        self.bos_token_id: int | None = None if hf.bos_token_id is None else int(hf.bos_token_id)

    @classmethod
    def from_pretrained(cls, path_or_id: str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer of a local folder (no network call) or of a Hugging Face id."""
        path = os.fspath(path_or_id)
        check_templates(path)
        known = KnownTokenizer.find(path) if not trust_remote_code else None
        if known is not None:
            loaded = cls(PlainTokenizer(path, known), eos_token_ids=known.eos_token_ids)
            if known.token_bytes is not None:
                loaded.token_bytes, loaded.exact_bytes = known.token_bytes
            return loaded
        local = only_local(path)
        try:
            with importing_transformers():
                from transformers import AutoTokenizer, GenerationConfig

                hf = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=local)
        except Exception as error:  # odd files raise any error in transformers
            raise ModelError(f"no tokenizer could be loaded from {path!r}: {why_not(path, error)}") from error
        try:
            eos = GenerationConfig.from_pretrained(path, local_files_only=local).eos_token_id
        except Exception as error:
            if os.path.exists(os.path.join(path, GENERATION_FILE)) or not isinstance(error, (OSError, ValueError)):
                raise ModelError(
                    f"{GENERATION_FILE} of {path!r} cannot be read ({type(error).__name__}: {error}); mend or remove it"
                ) from error
            eos = None  # there is none
        eos_ids = ends_of(eos)
        loaded = cls(hf, eos_token_ids=eos_ids)
        known = KnownTokenizer.of(path, hf, eos_ids) if not trust_remote_code else None
        if known is not None:
            known.keep(path, loaded.token_bytes, exact=loaded.exact_bytes)
        return loaded

    @classmethod
    def from_hf(cls, hf: Any, *, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Wrap a loaded Hugging Face tokenizer. `eos_token_ids` are those of the model's generation config."""
        return cls(hf, eos_token_ids=eos_token_ids)

    @property
    def complete(self) -> Any:
        """The tokenizer as transformers loads it, which may import transformers; `hf` answers what the runtime asks."""
        return self.hf.complete if isinstance(self.hf, PlainTokenizer) else self.hf

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id the tokenizer knows; the model's logits may be wider."""
        if "token_bytes" in self.__dict__:
            return len(self.token_bytes)  # each call of get_vocab makes a dictionary
        return 1 + max(max(self.hf.get_vocab().values(), default=-1), max(self.hf.added_tokens_decoder, default=-1))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids and prompts."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        body = backend.to_str() if backend is not None else json.dumps(self.hf.get_vocab(), sort_keys=True)
        template = json.dumps(getattr(self.hf, "chat_template", None), sort_keys=True)
        return hashlib.blake2b(f"{body}\0{template}\0{self._default_bos}".encode(), digest_size=16).hexdigest()

    # -- text to ids -------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Encode the whole of a prompt: as is, after one BOS if the tokenizer puts one by default."""
        ids = self.encode_one(text)
        bos = self._default_bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode_continuation(self, text: str) -> list[int]:
        """Encode text that follows other text: no BOS and no space put before it. Special tokens are parsed."""
        if not text:
            return []
        if self.continuation_backend is None:
            return self.ids_alone(text)
        _check_writable(text)
        return list(self.continuation_backend.encode(text, add_special_tokens=False).ids)

    def ids_alone(self, text: str) -> list[int]:
        """The ids of `text` on its own: no BOS, special tokens are parsed.

        Asks the tokenizer's core where it may: a third of the time of Hugging Face's wrapper. Blocks of a long text
        that were encoded before are not encoded again: frameworks count the tokens of the same documents many times.
        """
        backend = self.backend
        if backend is None:
            return self.encode_one(text)
        _check_writable(text)
        ids: list[int]
        if len(text) < 2 * BLOCK_CHARS:
            ids = backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self._batch_encoder.encode([text])[0].tolist()
        return ids

    @property
    def backend(self) -> Any:
        """The tokenizer's core (a `tokenizers.Tokenizer`) while it encodes as `encode_one` does.

        None for a tokenizer without one, and while its owner has it cut, pad or take special tokens as plain text.
        """
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return None
        return None if backend.encode_special_tokens or getattr(self.hf, "split_special_tokens", False) else backend

    def encode_one(self, text: str) -> list[int]:
        """Encode a text through Hugging Face's wrapper, without a BOS. Special tokens are parsed."""
        _check_writable(text)
        return [int(i) for i in self.hf.encode(text, add_special_tokens=False, verbose=False)]

    @cached_property
    def _batch_encoder(self) -> BatchEncoder:
        return BatchEncoder(self)

    def with_bos(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids of a prompt: after one BOS if the tokenizer puts one by default."""
        bos = self._default_bos
        if bos is None or (len(ids) and ids[0] == bos):
            return ids
        return np.concatenate([np.array([bos], dtype=np.int32), ids])

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in characters, a generous bound if a normalizer may shorten texts."""
        longest = max(map(len, self.hf.get_vocab()), default=1)
        return longest if self.exact_bytes else 16 * longest

    def encode_within(self, text: str, most: int) -> NDArray[np.int32] | GraftError:
        """Encode a text of any length without a BOS, within bounded time, memory and stretches that hold the GIL.

        Return RequestTooLong for a text of more than `most` tokens: before it is encoded, if its characters tell.
        """
        if len(text) > most and len(text) > most * self.longest_token:
            message = f"the prompt has {len(text):,} characters, more than {most:,} tokens can hold; shorten it"
            return RequestTooLong(message, limit=most)
        try:
            _check_writable(text)
            if len(text) <= LONG_CHARS:
                return self._batch_encoder.encode([text])[0]
            ids = self._batch_encoder.encode_long(text, most)
        except Exception as error:
            return failure_of(error)
        if ids is None:
            message = f"the prompt has more than {most:,} tokens, the context is {most:,}; shorten it"
            return RequestTooLong(message, limit=most)
        return ids

    def encode_texts(self, texts: list[str], most: int | None = None) -> list[NDArray[np.int32] | GraftError]:
        """Encode whole prompts in one batch: each as is, after one BOS if the tokenizer puts one by default.

        The ids are those of each whole text, whatever prefix it shares with others. A text that cannot be encoded
        gives its error instead: one that is empty, has a lone surrogate, or that the tokenizer refuses.

        most  limit of a text's tokens, for long texts; a text that exceeds it gives RequestTooLong, soon
        """
        _ = self._default_bos  # asks Hugging Face's wrapper, which takes back a truncation that an owner's call left
        results: list[NDArray[np.int32] | GraftError] = []
        long = [] if most is None else [i for i, text in enumerate(texts) if len(text) > min(most, LONG_CHARS)]
        apart = {i: self.encode_within(texts[i], most or 0) for i in long}
        others = iter(self._encode_each([text for i, text in enumerate(texts) if i not in apart]))
        for ids in (apart[i] if i in apart else next(others) for i in range(len(texts))):
            if isinstance(ids, GraftError):
                results.append(ids)
                continue
            ids = self.with_bos(ids)
            results.append(ids if len(ids) else ConfigError("the prompt is empty; give at least one token"))
        return results

    def _encode_each(self, texts: list[str]) -> Sequence[NDArray[np.int32] | GraftError]:
        """Return the ids of each text, or the error that the tokenizer raised for it."""
        try:
            for text in texts:
                _check_writable(text)
            return self._batch_encoder.encode(texts)
        except Exception as error:
            if len(texts) == 1:
                return [failure_of(error)]
            return [self._encode_each([text])[0] for text in texts]

    def render(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Write messages with the model's chat template, once.

        continue_final_message  the text ends inside the last message, so that the model goes on with it
        options                 further arguments of the template, such as {"enable_thinking": False}
        Messages with pictures or videos give a MediaText, which holds them.
        Raises ConfigError if there is no template or it refuses these messages.
        """
        if not self.has_chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot be rendered; "
                "give the prompt as text, or set tokenizer.chat_template"
            )
        messages = to_messages(messages)
        has_media = self.media is not None and any(m.has_media for m in messages)
        dicts = to_template_dicts(messages, multimodal=has_media, model_name=self.model_name)
        if any(message.thinking for message in messages):
            place = ThoughtPlace.of(self, lambda probe: self._rendered(probe, None, False, False, {}))
            dicts = place.fill(dicts, [message.thinking for message in messages])
        render = partial(self._rendered, dicts, tools, add_generation_prompt, continue_final_message, options or {})
        if has_media:
            assert self.media is not None
            return self.media.text(messages, render)
        return render()

    def _rendered(
        self,
        dicts: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        options: Mapping[str, Any],
    ) -> str:
        try:
            text = render_limit.limited(
                lambda: self.hf.apply_chat_template(
                    dicts,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    **options,
                )
            )
        except Exception as error:  # templates are programs of the model's author and raise what they like
            roles = ", ".join(message["role"] for message in dicts)
            raise ConfigError(f"the model's chat template refuses these messages (roles: {roles}): {error}") from error
        return str(text)

    @cached_property
    def _default_bos(self) -> int | None:
        """The id that the tokenizer puts before every text, if it is BOS."""
        ids = self.hf.encode("a", add_special_tokens=True, verbose=False)
        return self.bos_token_id if ids[0] == self.bos_token_id else None

    @cached_property
    def continuation_backend(self) -> Any:
        """The tokenizer without the space that it puts before a text; None if it puts none."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None or not self._starts_with_space(self.encode_one("a")):
            return None
        import tokenizers

        spec = json.loads(backend.to_str())
        spec["normalizer"] = _without_space(spec["normalizer"])
        spec["pre_tokenizer"] = _without_space(spec["pre_tokenizer"])
        spec["truncation"] = spec["padding"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def _starts_with_space(self, ids: list[int]) -> bool:
        return bool(ids) and self.hf.convert_ids_to_tokens(ids[0])[:1] in (SPACE_MARK, "\u0120")

    # -- ids to text -------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode ids that begin a text; what goes on after other text is decoded by a `Detokenizer`."""
        known = [int(i) for i in ids if int(i) < self.vocab_size]
        return str(self.hf.decode(known, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def is_special(self, token_id: int) -> bool:
        """Whether the id stands for no text (BOS, ends of turns, padding) or is none of the tokenizer's own."""
        return token_id in self.special_ids or not 0 <= token_id < self.vocab_size

    def whole_text(self, token_id: int) -> str | None:
        """The text of one token in the middle of a text; None if it is special or holds part of a character."""
        if self.is_special(token_id) or not self.exact_bytes:
            return None
        try:
            return self.token_bytes[token_id].decode()
        except UnicodeDecodeError:
            return None

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes each id adds to a text that goes on; b"" for special ids. [vocab_size]"""
        return byte_table(self)

    @cached_property
    def exact_bytes(self) -> bool:
        """Whether joining `token_bytes` gives the text, so that text can be decoded token by token."""
        return table_is_exact(self)

    @cached_property
    def shown_bytes(self) -> list[bytes]:
        """`token_bytes`, with the names of special tokens. [vocab_size]"""
        table = list(self.token_bytes)
        for token_id in self.special_ids:
            if token_id < len(table) and not table[token_id]:
                table[token_id] = str(self.hf.convert_ids_to_tokens(token_id)).encode()
        return table

    def bytes_with(self, names: frozenset[str]) -> list[bytes]:
        """`token_bytes`, with the names of these special tokens. [vocab_size]"""
        key = ("bytes_with", names)
        table: list[bytes] | None = self.derived.get(key)
        if table is None:
            table = self.derived[key] = list(self.token_bytes)
            for token_id in self.special_ids:
                if token_id < len(table) and self.shown_bytes[token_id].decode() in names:
                    table[token_id] = self.shown_bytes[token_id]
        return table

    def detokenizer(self, before: Sequence[int] = (), *, special: bool | frozenset[str] = False) -> Detokenizer:
        """Return a new incremental decoder for an answer that follows a prompt, of which `before` are the last ids.

        special  show all special tokens by their names, or those of these names
        """
        return Detokenizer(self, before, special=special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that stand for no text: BOS, ends of turns, padding."""
        added = (i for i, token in self.hf.added_tokens_decoder.items() if token.special)
        return frozenset([*self.hf.all_special_ids, *added])


def _check_writable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text holds a lone surrogate ({text[error.start]!r}, character {error.start:,}), which UTF-8 cannot "
            "write; read it with errors='replace', or remove it"
        ) from error


def _without_space(component: Any) -> Any:
    """A normalizer or pre-tokenizer of tokenizer.json that puts no space before the text."""
    if isinstance(component, list):
        return [_without_space(item) for item in component if item.get("type") != "Prepend"]
    if not isinstance(component, dict):
        return component
    if component.get("type") == "Prepend":
        return None
    changed = {key: _without_space(value) if isinstance(value, list) else value for key, value in component.items()}
    if component.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
        changed.pop("add_prefix_space", None)
    elif "add_prefix_space" in component:
        changed["add_prefix_space"] = False
    return changed
