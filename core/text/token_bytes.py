"""The bytes that stand behind a vocabulary's tokens, and whether they make up its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

SPACE_MARK = "\u2581"  # how sentencepiece writes a space
_JOINT = "\ufffe"  # no character, and so hardly in a piece


def _decoder_types(backend: Any) -> set[str]:
    """The kinds of a tokenizer.json's decoders, nested ones included."""
    if backend is None or backend.decoder is None:
        return set()
    found: set[str] = set()

    def walk(decoder: dict[str, Any]) -> None:
        found.add(decoder["type"])
        for inner in decoder.get("decoders", ()):
            walk(inner)

    walk(json.loads(backend.decoder.__getstate__()))
    return found


def byte_table(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes each id adds to a text that goes on; b"" for special ids. [vocab_size]"""
    hf = tokenizer.hf
    kinds = _decoder_types(getattr(hf, "backend_tokenizer", None))
    vocab: dict[str, int] = hf.get_vocab()
    added = {i: token.content for i, token in hf.added_tokens_decoder.items()}
    table = [b""] * (1 + max(max(vocab.values(), default=-1), max(added, default=-1)))
    found = _byte_level(list(vocab)) if "ByteLevel" in kinds else (_piece_bytes(kinds, piece) for piece in vocab)
    for i, piece in zip(vocab.values(), found, strict=True):
        table[i] = piece
    for i in added.keys() & vocab.values():
        table[i] = added[i].encode()
    for i in tokenizer.special_ids:
        if 0 <= i < len(table):
            table[i] = b""
    return table


def _byte_level(pieces: list[str]) -> Iterator[bytes]:
    """Yield the bytes of pieces whose characters stand for bytes; any other piece is its own text."""
    # what stands for no byte becomes a character that is none
    byte_of = dict.fromkeys(range(256), 0xFFFF) | {ord(c): byte for byte, c in enumerate(_byte_alphabet())}
    texts = _JOINT.join(pieces).translate(byte_of).split(_JOINT)  # one call is several times as fast as one for each
    if len(texts) != len(pieces):
        texts = [piece.translate(byte_of) for piece in pieces]
    for piece, text in zip(pieces, texts, strict=True):
        try:
            yield text.encode("latin-1")
        except UnicodeEncodeError:
            yield piece.encode()


def _piece_bytes(kinds: set[str], piece: str) -> bytes:
    """Return the bytes of a piece of a vocabulary whose decoders are of these kinds."""
    if "ByteFallback" in kinds and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    if "WordPiece" in kinds:
        return piece[2:].encode() if piece.startswith("##") else b" " + piece.encode()
    return piece.replace(SPACE_MARK, " ").encode()


def table_is_exact(tokenizer: Tokenizer) -> bool:
    """Compare joined bytes with the tokenizer's own decoding over samples of text and of the vocabulary.

    The first text token anchors each sample, because what begins a text may lose its leading space.
    """
    table = tokenizer.token_bytes
    text_ids = [i for i, piece in enumerate(table) if piece and _is_text(piece)]
    if not text_ids:
        return False
    samples = [tokenizer.encode_continuation(text) for text in _SAMPLES]
    samples.extend(text_ids[start :: max(1, len(text_ids) // 64)][:64] for start in range(8))
    anchor = text_ids[0]
    shown = tokenizer.decode([anchor])
    for ids in samples:
        expected = tokenizer.decode([anchor, *ids])
        joined = b"".join(table[i] for i in ids if not tokenizer.is_special(i))
        if not expected.startswith(shown) or expected[len(shown) :] != joined.decode("utf-8", "replace"):
            return False
    return True


_SAMPLES = (
    "Hello, world! It's 3.5 o'clock.",
    " a  b\n\n\tc ",
    "na\u00efve \u4e2d\u6587 \U0001f600!",
    "def f(x): return {'a': [1, 2]}",
)


def _is_text(piece: bytes) -> bool:
    if piece.isascii() and piece[-1:].isalnum():
        return True  # most of a vocabulary
    try:
        return bool(piece.decode().strip())
    except UnicodeDecodeError:
        return False


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE vocabularies.

    Source: GPT-2. Printable Latin-1 stands for itself; the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
