"""A tokenizer's core without transformers, where a first load found it to be all that transformers makes of the files.

Rendering a chat template and whatever else the runtime does not ask for still goes through transformers, then imported.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from graftlm.core.hub import only_local
from graftlm.core.model.embedded import sprout_folder
from graftlm.core.model.transformers_lock import importing_transformers
from graftlm.kernels import disk_cache

_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.jinja", "vocab*", "merges*", "*config.json")
"""The files that transformers may read a tokenizer from."""

_KEPT = 64
_SAMPLES = ("a", " a b", "The  quick\nbrown fox, é 你好 🙂 <|x|>", "")


@dataclass(frozen=True)
class KnownTokenizer:
    """The record of a tokenizer whose tokenizer.json transformers takes as it is.

    special_tokens  by their names, as chat templates are given them
    eos_token_ids   of the generation config
    token_bytes     as `Tokenizer` has them, and whether they are exact; None where they are to be computed
    """

    kind: str
    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: list[int]
    all_special_tokens: list[str]
    special_tokens: dict[str, str]
    chat_template: str | None
    eos_token_ids: list[int]
    token_bytes: tuple[list[bytes], bool] | None = None

    @classmethod
    def of(cls, path: str, hf: Any, eos_token_ids: Iterable[int]) -> KnownTokenizer | None:
        """None where the core differs from its file, or transformers does more than to hand a text to it."""
        import tokenizers

        backend, file = getattr(hf, "backend_tokenizer", None), Path(path) / "tokenizer.json"
        template = getattr(hf, "chat_template", None)
        if backend is None or not file.is_file() or not isinstance(template, str | None):
            return None
        core = tokenizers.Tokenizer.from_file(str(file))
        if core.to_str() != backend.to_str() or core.truncation is not None or core.padding is not None:
            return None
        if backend.encode_special_tokens or getattr(hf, "split_special_tokens", False):
            return None
        special = {name: str(token) for name, token in hf.special_tokens_map.items() if isinstance(token, str)}
        if len(special) < len(hf.special_tokens_map):
            return None
        known = cls(
            type(hf).__name__, hf.bos_token_id, hf.eos_token_id, list(hf.all_special_ids),
            [str(token) for token in hf.all_special_tokens], special, template, list(eos_token_ids),
        )  # fmt: skip
        return known if _same(PlainTokenizer(path, known), hf) else None

    def keep(self, path: str, table: list[bytes], *, exact: bool) -> None:
        """Write the record for later processes, where there is a folder for it; with the bytes of all tokens."""
        where = _record_path(path)
        if where is not None:
            text = json.dumps({name: value for name, value in asdict(self).items() if name != "token_bytes"})
            arrays = {
                "record": np.frombuffer(text.encode(), np.uint8),
                "bytes": np.frombuffer(b"".join(table), np.uint8),
                "ends": np.cumsum([len(piece) for piece in table]),
                "exact": np.array([exact]),
            }
            disk_cache.save_arrays(where, arrays)
            disk_cache.trim(where.parent, _KEPT)

    @classmethod
    def find(cls, path: str) -> KnownTokenizer | None:
        """The record of the tokenizer in a folder; None if there is none."""
        if not Path(path).is_dir():
            return None
        if Path(path) == sprout_folder():
            return cls(**json.loads(EMBEDDED.read_text(encoding="utf-8")))
        where = _record_path(path)
        kept = disk_cache.load_arrays(where) if where is not None else None
        if kept is None:
            return None
        data, ends = kept["bytes"].tobytes(), kept["ends"].tolist()
        table = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return cls(**json.loads(kept["record"].tobytes()), token_bytes=(table, bool(kept["exact"][0])))


EMBEDDED = sprout_folder().with_name("sprout_known") / "tokenizer.json"
"""The record of the embedded model's tokenizer; tests/core/text/test_plain_tokenizer.py compares it with a new one."""


class PlainTokenizer:
    """Answers what the runtime asks of a tokenizer of transformers; for the rest, it becomes one."""

    def __init__(self, path: str, known: KnownTokenizer) -> None:
        import tokenizers

        self._path = path
        self._known = known
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        self.bos_token_id, self.eos_token_id = known.bos_token_id, known.eos_token_id
        self.special_tokens_map = known.special_tokens
        self.bos_token = known.special_tokens.get("bos_token")
        self.all_special_ids, self.all_special_tokens = known.all_special_ids, known.all_special_tokens
        self.chat_template = known.chat_template
        self.split_special_tokens = False

    @cached_property
    def complete(self) -> Any:
        """The tokenizer as transformers loads it, with this one's chat template."""
        local = only_local(self._path)
        with importing_transformers():
            from transformers import AutoTokenizer

            complete: Any = AutoTokenizer.from_pretrained(self._path, local_files_only=local)
        complete.chat_template = self.chat_template
        return complete

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.complete, name)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, ids: list[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        if clean_up_tokenization_spaces:
            return str(self.complete.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=True))
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(self.backend_tokenizer.id_to_token(ids))

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """As transformers renders it, by its own function where a text is asked for, so that no tokenizer is loaded."""
        template = options.pop("chat_template", None) or self.chat_template
        if options.pop("tokenize", True) or not template:
            return self.complete.apply_chat_template(messages, **options)
        if not messages:
            raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        render = _renderer()
        (text,), _ = render(conversations=[messages], chat_template=template, **self._known.special_tokens, **options)
        return text


@cache
def _renderer() -> Any:
    """Return transformers' function; later calls wait for no lock."""
    with importing_transformers():
        from transformers.utils import chat_template_utils

    return chat_template_utils.render_jinja_template


def _same(plain: PlainTokenizer, hf: Any) -> bool:
    """Whether both encode and decode some texts alike, and know the same tokens."""
    for text in _SAMPLES:
        for special in (False, True):
            ids = hf.encode(text, add_special_tokens=special, verbose=False)
            if plain.encode(text, add_special_tokens=special) != ids:
                return False
            options = {"skip_special_tokens": special, "clean_up_tokenization_spaces": False}
            if plain.decode(ids, **options) != hf.decode(ids, **options):
                return False
    if plain.get_vocab() != hf.get_vocab():
        return False
    pairs = (
        {i: (token.content, token.special) for i, token in one.added_tokens_decoder.items()} for one in (plain, hf)
    )
    return next(pairs) == next(pairs)


def _record_path(path: str) -> Path | None:
    """The path of a tokenizer's record, named by the content of its files and the versions that it depends on."""
    folder = disk_cache.private_folder("known-tokenizers")
    if folder is None:
        return None
    digest = hashlib.blake2b(_versions().encode(), digest_size=12)
    for file in sorted({file for pattern in _FILES for file in Path(path).glob(pattern) if file.is_file()}):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return folder / f"{digest.hexdigest()}.record"


@functools.cache
def _versions() -> str:
    named = [disk_cache.version_of(name) for name in ("tokenizers", "transformers")]
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("plain_tokenizer.py", "token_bytes.py"))
    return repr([*named, hashlib.blake2b(code).hexdigest()])
