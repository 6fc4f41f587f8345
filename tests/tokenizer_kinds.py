"""Tokenizers of the kinds that published models use, trained here on a few lines, and some with odd habits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and doesn't stop.\nThen it sleeps.\n\nNew day: 12345 6.7!",
    "def add(a, b):\n    return a + b  # it's   fine\n\tprint(add(1, 22), 'x' * 333)\n",
    "You are a helpful assistant. Answer in one word. WE'LL SEE that they're right; I'd say so.",
    "na\u00efve caf\u00e9 \u4f60\u597d\uff0c\u4e16\u754c\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 \u3053 e\u0301",
] * 3
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN_APART = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


def _finish(core: Tokenizer, *added: AddedToken) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    core.add_tokens(list(added))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )


def _byte_level(pre: Any, *added: AddedToken, normalizer: Any = None, **model: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(**model))
    core.pre_tokenizer = pre
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    return _finish(core, *added)


def _split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def _bytes_after(*first: Any) -> Any:
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_bpe(normalizer: Any, pre: Any = None, *added: AddedToken, fuse_unk: bool = True) -> Any:
    """Byte fallback; trained with words kept apart, so no piece holds a mark behind a letter."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=fuse_unk))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = [chr(c) for c in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[*SPECIALS, *bytes_], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.normalizer = normalizer
    core.pre_tokenizer = pre
    return _finish(core, *added)


def _unigram(normalizer: Any, pre: Any, *added: AddedToken) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizer
    core.pre_tokenizer = pre
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    return _finish(core, *added)


def _words(model: Any, trainer: Any, pre: Any, normalizer: Any = None) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer = pre
    core.normalizer = normalizer
    core.train_from_iterator(CORPUS, trainer)
    return _finish(core)


def _wordpiece(normalizer: Any, pre: Any) -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    return _words(models.WordPiece(unk_token="<unk>"), trainer, pre, normalizer)


def _word_level(pre: Any) -> PreTrainedTokenizerFast:
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIALS, show_progress=False)
    return _words(models.WordLevel(unk_token="<unk>"), trainer, pre)


_GPT2 = pre_tokenizers.ByteLevel
_MARKS = normalizers.Replace(" ", "\u2581")
_DUMMY_PREFIX = normalizers.Sequence([normalizers.Prepend("\u2581"), _MARKS])
_NMT = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
_T5 = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "\u2581")])
_DEEPSEEK = [
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split(r"\s+$"),
    pre_tokenizers.Digits(True),
]

KINDS: dict[str, tuple[Callable[[], Any], bool]] = {
    # name: (how to make it, whether texts may be cut behind a letter)
    "gpt2": (lambda: _byte_level(_GPT2(add_prefix_space=False)), True),
    "roberta, a space before the text": (lambda: _byte_level(_GPT2(add_prefix_space=True)), True),
    "gpt-neox, runs of spaces as tokens": (
        lambda: _byte_level(_GPT2(add_prefix_space=False), *(AddedToken(" " * n, normalized=True) for n in (2, 3, 4))),
        True,
    ),
    "cl100k": (lambda: _byte_level(_bytes_after(_split(CL100K))), True),
    "llama 3, whole words looked up first": (
        lambda: _byte_level(_bytes_after(_split(CL100K)), ignore_merges=True),
        True,
    ),
    "qwen, composed characters": (
        lambda: _byte_level(_bytes_after(_split(CL100K)), normalizer=normalizers.NFC()),
        True,
    ),
    "o200k, what is matched is kept": (lambda: _byte_level(_bytes_after(_split(O200K, "removed", True))), True),
    "ideographs apart": (lambda: _byte_level(_bytes_after(_split(HAN_APART))), True),
    "deepseek": (lambda: _byte_level(_bytes_after(*_DEEPSEEK)), True),
    "starcoder": (lambda: _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _GPT2(False)])), True),
    "falcon": (
        lambda: _byte_level(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Punctuation("contiguous"), _GPT2(False), pre_tokenizers.Digits(), _split("[0-9]{3}")]
            )
        ),
        True,
    ),
    "bytes without words": (lambda: _byte_level(_GPT2(False, use_regex=False)), False),
    "llama 2": (lambda: _sentencepiece_bpe(_DUMMY_PREFIX), True),
    "llama 2, unknown ones apart": (lambda: _sentencepiece_bpe(_DUMMY_PREFIX, fuse_unk=False), True),
    "gemma": (lambda: _sentencepiece_bpe(_MARKS, pre_tokenizers.Split(" ", "merged_with_previous")), True),
    "mistral, prefix before the first word": (
        lambda: _sentencepiece_bpe(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        True,
    ),
    "prefix before every segment": (
        lambda: _sentencepiece_bpe(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
        True,
    ),
    "no prefix": (lambda: _sentencepiece_bpe(None, pre_tokenizers.Metaspace(prepend_scheme="never")), True),
    "t5": (lambda: _unigram(_T5, pre_tokenizers.Metaspace(prepend_scheme="always")), True),
    "xlm-r": (
        lambda: _unigram(_NMT, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])),
        False,
    ),
    "unigram over whole texts": (lambda: _unigram(_MARKS, None), False),
    "bert": (lambda: _wordpiece(normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()), True),
    "words and punctuation": (lambda: _wordpiece(normalizers.Lowercase(), pre_tokenizers.Whitespace()), True),
    "whole words": (lambda: _word_level(pre_tokenizers.WhitespaceSplit()), True),
    "words between spaces": (lambda: _word_level(pre_tokenizers.CharDelimiterSplit(" ")), True),
    "llama 2, a token of its user": (lambda: _sentencepiece_bpe(_DUMMY_PREFIX, None, AddedToken("fox")), False),
    "llama 2, a token that is no cut": (
        lambda: _sentencepiece_bpe(_DUMMY_PREFIX, None, AddedToken("<mask>", lstrip=True, normalized=False)),
        True,
    ),
    "scripts apart": (
        lambda: _byte_level(pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), _GPT2(False)])),
        False,
    ),
    "a space stripped at the start": (
        lambda: _byte_level(_GPT2(False), normalizer=normalizers.Strip()),
        False,
    ),
    "a token that takes the space behind it": (
        lambda: _byte_level(_GPT2(False), AddedToken("fox", rstrip=True)),
        False,
    ),
    "a token that takes the space before it": (
        lambda: _byte_level(_GPT2(False), AddedToken("<mask>", lstrip=True, special=True)),
        True,
    ),
    "a token of two words": (lambda: _byte_level(_GPT2(False), AddedToken("brown fox")), False),
    "special tokens that overlap": (
        lambda: _byte_level(_GPT2(False), AddedToken("x<|im_"), AddedToken("<|im_end|>\n", special=True)),
        True,
    ),
}


@cache
def tokenizer_kind(name: str) -> Any:
    return KINDS[name][0]()
