"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and the ids that end an answer.

llama.cpp names the rule that splits a text into words ("tokenizer.ggml.pre"); a wrong rule gives other tokens, so an
unknown one is refused.
"""

from __future__ import annotations

from typing import Any

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.reader import GgufFile

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
        "</s>", "<eos>", "<EOT>", "_<EOT>", "< EOT >", "<|EOT|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|call|>",
        "<end_of_utterance>",
    }
)  # fmt: skip
"""Control tokens that end an answer whatever the metadata says, as llama.cpp does."""

_HARMONY = frozenset({"<|return|>", "<|call|>"})
"""In a vocabulary that has these, <|end|> ends a message, after which the answer goes on."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "gpt-2", "digits"

_SPLITS = {
    _GPT2: ("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "gpt-neox", "stablelm", "dolma2", "roberta-bpe"),
    _DIGITS: ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "granite-code"),
    _LLAMA3: (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe",
        "glm4", "chatglm-bpe",
    ),
    _QWEN2: ("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "hunyuan", "megrez"),
    _TEKKEN: ("tekken",),
    _GPT4O: ("gpt-4o", "llama4", "kanana2"),
}  # fmt: skip
"""Rules that split a text into words -> llama.cpp's names for them."""

_WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""Vocabularies whose entries are taken whole before merges are tried, and that put BOS first by default."""


_NOTHING_BEFORE: Json = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
"""The post-processor that transformers writes for none; an equal one lets later processes load without transformers."""


def tokenizer_files(file: GgufFile) -> dict[str, Json]:
    """Return the content of tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises ModelError for a tokenizer of an unknown kind.
    """
    meta = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    kind = meta.get("tokenizer.ggml.model")
    if not tokens or kind not in ("gpt2", "llama"):
        said = f"a tokenizer of kind {kind!r}" if tokens else "no tokenizer"
        raise ModelError(
            f"{str(file.paths[0])!r} has {said}; byte-level BPE ('gpt2') and SentencePiece BPE ('llama') are read: use "
            "the model's Hugging Face files"
        )
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    spec = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, types)
    names = {
        name: tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := file.token_id(key)) is not None
    }
    spec["added_tokens"] = _added(spec["model"]["vocab"], tokens, types, set(names.values()))
    adds = "bos" in names and _adds_bos(file, kind)
    spec["post_processor"] = _before_text(names["bos"], tokens) if adds else _NOTHING_BEFORE
    config: Json = {f"{name}_token": token for name, token in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_max_length"] = file.get("context_length")
    if meta.get("tokenizer.chat_template"):
        config["chat_template"] = meta["tokenizer.chat_template"]
    return {
        "tokenizer.json": spec,
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": end_ids(file, tokens, types)},
    }


def end_ids(file: GgufFile, tokens: list[str], types: list[int]) -> list[int]:
    """Return the ids that end an answer: those of the metadata, and control tokens that end turns."""
    found = [number for name in ("eos", "eot", "eom") if (number := file.token_id(name)) is not None]
    ends = END_TOKENS - {"<|end|>"} if set(tokens) >= _HARMONY else END_TOKENS
    found += [i for i, token in enumerate(tokens) if token in ends and types[i] in (_CONTROL, _USER)]
    return list(dict.fromkeys(found))


def _adds_bos(file: GgufFile, kind: str) -> bool:
    found = file.metadata.get("tokenizer.ggml.add_bos_token")
    if found is None:
        return kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    return bool(found)


def _before_text(bos: str, tokens: list[str]) -> Json:
    """Return the post-processor that puts BOS before a text."""
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _added(vocab: dict[str, int], tokens: list[str], types: list[int], named: set[str]) -> list[Json]:
    """Return the tokens that are found in a text before it is split: control tokens, and those of the model's user."""
    return [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": types[i] != _USER or token in named,
        }
        for i, token in enumerate(tokens)
        if token and (types[i] in (_CONTROL, _USER, _UNKNOWN) or token in named) and vocab.get(token, i) == i
    ]  # fmt: skip


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Json:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": [list(pair) for pair in merges],
    } | options  # fmt: skip


def _spec(model: Json, **parts: Any) -> Json:
    whole: Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    return whole | {"pre_tokenizer": None, "post_processor": None, "decoder": None} | parts | {"model": model}


# -- byte-level BPE ------------------------------------------------------------------------------------------------


def _byte_level(file: GgufFile, tokens: list[str]) -> Json:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    rule = next((rule for rule, names in _SPLITS.items() if pre in names), None)
    if rule is None:
        raise ModelError(
            f"{str(file.paths[0])!r} splits texts by the rule {pre!r}, which is not known, so its tokens would be "
            "wrong; pass tokenizer= with the tokenizer of the model's Hugging Face files"
        )
    spaced = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    merges = [_pair(merge) for merge in file.metadata.get("tokenizer.ggml.merges", ())]
    level: Json = {"type": "ByteLevel", "add_prefix_space": spaced, "trim_offsets": False, "use_regex": False}
    if rule in (_GPT2, _DIGITS):
        level["use_regex"] = True
        digits = [{"type": "Digits", "individual_digits": True}] if rule == _DIGITS else []
        splits: list[Json] = [*digits, level]
    else:
        splits = [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}, level]
    return _spec(
        _bpe(_vocab(tokens), merges, ignore_merges=pre in _WHOLE_WORDS),
        normalizer={"type": "NFC"} if rule == _QWEN2 else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": splits} if len(splits) > 1 else splits[0],
        decoder=level | {"use_regex": True, "add_prefix_space": True},
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ") if not merge.startswith(" ") else (" ", "", merge[2:])
    return left, right


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Return ids by token, the first id of a token that is there twice."""
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    return vocab


# -- SentencePiece BPE ---------------------------------------------------------------------------------------------

SPACE = "\u2581"


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Json:
    gemma = file.architecture.startswith("gemma")
    if gemma:  # runs of spaces are written as spaces
        tokens[:] = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = _vocab(tokens)
    scores = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    given = file.metadata.get("tokenizer.ggml.merges")
    ranks = [-float(i) for i in range(len(tokens))] if gemma else scores  # Gemma's scores are not its merges' order
    merges = [_pair(merge) for merge in given] if given else merges_of(vocab, tokens, ranks, types)
    unknown = file.token_id("unknown")
    model = _bpe(
        vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown] if unknown is not None else None
    )
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back: list[Json] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if gemma or not file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        return _spec(model, normalizer=spaces, decoder={"type": "Sequence", "decoders": back})
    before = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
    back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _spec(model, normalizer=before, decoder={"type": "Sequence", "decoders": back})


def merges_of(vocab: dict[str, int], tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary with scores implies: both halves of each token, best score first."""
    found: list[tuple[float, str, str]] = []
    for i, token in enumerate(tokens):
        if len(token) < 2 or types[i] not in (_NORMAL, _USER, _UNUSED) or vocab[token] != i:
            continue
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        both = [(left, right) for left, right in splits if left in vocab and right in vocab]
        found += [(scores[i], left, right) for left, right in sorted(both, key=lambda x: (vocab[x[0]], vocab[x[1]]))]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]
