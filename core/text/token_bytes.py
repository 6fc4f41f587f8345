"""The bytes that stand behind a vocabulary's tokens, and whether they make up its texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

SPACE_MARK = "\u2581"  # how sentencepiece writes a space


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
    added = {i: token.content for i, token in hf.added_tokens_decoder.items()}
    # what stands for no byte becomes a character that is none
    byte_of = dict.fromkeys(range(256), 0xFFFF) | {ord(c): byte for byte, c in enumerate(_byte_alphabet())}
    table = [b""] * tokenizer.vocab_size
    for piece, i in hf.get_vocab().items():
        if tokenizer.is_special(i):
            continue
        if i in added:
            table[i] = added[i].encode()
        elif "ByteLevel" in kinds:
            try:
                table[i] = piece.translate(byte_of).encode("latin-1")
            except UnicodeEncodeError:
                table[i] = piece.encode()
        elif "ByteFallback" in kinds and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            table[i] = bytes([int(piece[3:5], 16)])
        elif "WordPiece" in kinds:
            table[i] = piece[2:].encode() if piece.startswith("##") else b" " + piece.encode()
        else:
            table[i] = piece.replace(SPACE_MARK, " ").encode()
    return table


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
