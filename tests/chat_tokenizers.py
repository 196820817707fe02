"""Tiny tokenizers that carry the original chat templates of real model families."""

from __future__ import annotations

import importlib.resources
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
_MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
FAMILIES: dict[str, tuple[list[str], list[str], str]] = {
    "smollm2": (_CHATML, [], "<|im_end|>"),
    "qwen2_5": (_CHATML, _MARKUP[:4], "<|im_end|>"),
    "qwen3": (_CHATML, _MARKUP, "<|im_end|>"),
    "llama3": (_LLAMA, [], "<|eot_id|>"),
    "llama3_1": (_LLAMA, [], "<|eot_id|>"),
    "llama3_2": (_LLAMA, [], "<|eot_id|>"),
}
"""Name of the template: special tokens, ordinary added tokens, the end of a turn."""


def template(family: str) -> str:
    """The original jinja of a family, as the trl package ships it."""
    if family == "smollm2":
        return SMOLLM2
    folder = importlib.resources.files("trl") / "chat_templates"
    return (folder / f"{family}.jinja").read_text(encoding="utf-8")


@cache
def make_tokenizer(family: str) -> Any:
    """A byte-level BPE tokenizer of some 300 entries with the family's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special, ordinary, end = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(["hello", "world", "Ġthe", "Ġassistant", "price", "kite"])
    words = [*alphabet, *("".join(merge) for merge in merges)]
    bpe = models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        bos_token="<|begin_of_text|>" if special is _LLAMA else None,
        extra_special_tokens=[t for t in special if t != end],
    )
    fast.chat_template = template(family)
    return fast


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(word[:k], word[k]) for word in words for k in range(1, len(word))]
    return list(dict.fromkeys(itertools.chain(pairs)))


def spelled(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The text token by token as single bytes: a tokenisation that ``encode`` does not choose."""
    return tuple(i for character in text for i in tokenizer.encode(character, add_special_tokens=False))
