"""The tokenizer: byte-level BPE in which a name is the same tokens wherever it stands.

Letters, digits, white space and punctuation never share a token: a word follows a space, a quote or
a newline unchanged, and a digit is a token. A few marks of the wire formats are one token each.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from bench.sprout.document import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, Document

VOCAB_SIZE = 4096
PIECES = r"<\|[a-z_]+\|>|</?tool_call>|\[\[ ## | ## \]\]|-{4,}| {8}|[0-9]|[A-Za-z]+|[ \t\r\n]|[^ \t\r\nA-Za-z0-9]"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)


def num_pieces(text: str) -> int:
    """Return the number of pieces of the text before merging, a lower bound of its tokens."""
    return len(re.findall(PIECES, text))


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """Return a `tokenizers.Tokenizer` trained on `texts`; the first ids are SPECIAL."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_transformers(tokenizer: Any, context: int) -> Any:
    """Return the tokenizer as transformers saves it, with the chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[IM_START],
    )


class FastEncoder:
    """An encoder with the tokenizer's ids, by a dictionary of pieces: about four times as fast."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._split = re.compile(PIECES).findall
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        known = self._known
        ids: list[int] = []
        for piece in self._split(text):
            found = known.get(piece)
            if found is None:
                found = self._tokenizer.encode(piece, add_special_tokens=False).ids
                if len(known) < 400_000:
                    known[piece] = found
            ids += found
        return ids

    def document(self, document: Document, weight: int, rest: int) -> tuple[list[int], list[int]]:
        """Return the ids of the whole text and one weight per id: `weight` where the model writes, else `rest`.

        Segments are encoded one by one: a segment boundary is always a token boundary.
        """
        ids: list[int] = []
        weights: list[int] = []
        for segment in document.segments:
            new = self.encode(segment.text)
            ids += new
            weights += [weight if segment.learned else rest] * len(new)
        return ids, weights


def main(argv: list[str]) -> int:
    """`python -m bench.sprout.tokenizer FOLDER [DOCUMENTS]`: train on documents of the mixture."""
    from pathlib import Path

    from bench.sprout.folder import write_tokenizer
    from bench.sprout.mixture import documents
    from bench.sprout.wires import Wires

    folder, count = Path(argv[0]), int(argv[1]) if len(argv) > 1 else 12_000
    stream = itertools.islice(documents("tokenizer", "train", Wires.load()), count)
    write_tokenizer(folder, train(document.text for document in stream))
    print(f"{folder}: tokenizer of {count:,} documents")
    return 0


def segment_ids(tokenizer: Any, document: Document) -> list[tuple[Sequence[int], bool]]:
    """Return (ids, learned) of each segment."""
    return [(tokenizer.encode(s.text, add_special_tokens=False).ids, s.learned) for s in document.segments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
