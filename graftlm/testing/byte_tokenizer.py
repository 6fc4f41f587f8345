"""A tokenizer with one token per byte, built in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from graftlm.core.model.transformers_lock import importing_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<tool_call>", "</tool_call>", "<|mask|>")
BOS, EOS, IM_START, IM_END, PAD = range(256, 261)

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n' }}\
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}<tool_call>{"name": "{{ function.name }}", \
"arguments": {{ function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer(*, merges: Sequence[tuple[str, str]] = (), add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose id of a byte is that byte; special tokens follow from 256 on.

    merges   pairs of BPE pieces in the byte alphabet, e.g. [("t", "h"), ("th", "e")]; their ids follow the specials.
    add_bos  True: encoding puts "<|bos|>" first, as Llama's tokenizer does.

    The end of a turn and of the text is "<|im_end|>". The chat template is ChatML with tools.
    """
    with importing_transformers():
        from transformers import PreTrainedTokenizerFast
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    first_merge = len(vocab) + len(SPECIALS)
    vocab |= {name: 256 + i for i, name in enumerate(SPECIALS)}
    vocab |= {left + right: first_merge + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    words = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for name in SPECIALS:  # the tags of tool calls are text, as in published models: decoding keeps them
        special = not name.endswith("tool_call>")
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(name, special=special, normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_alphabet() -> list[str]:
    """Return the printable character of each byte in byte-level BPE vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet, extra = [""] * 256, 256
    for byte in range(256):
        if byte in printable:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(extra)
            extra += 1
    return alphabet
