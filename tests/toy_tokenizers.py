"""Small tokenizers of the kinds that published models use, built in memory."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2: spaces as U+2581, one put before every text, unknown characters as byte tokens, BOS by default."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,!",
    ]
    merges = [("h", "e"), ("▁", "he"), ("l", "l"), ("ll", "o"), ("▁he", "llo"), ("▁", "a")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As Mistral and T5: the space mark comes from the pre-tokenizer, before the first word only."""
    pieces = ["<unk>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT: text cannot be had from the tokens one by one, because the decoder tidies up spaces."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "un", "##able", "able", "to", "go", ".", ","]
    tokenizer = Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
