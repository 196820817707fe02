"""Tiny tokenizers that carry the original chat templates of real model families."""

from __future__ import annotations

import importlib.resources
import itertools
import re
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
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>"
    "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>"
    "You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>{{ '\n' }}{% endif %}"
    "{% set name = m.name or m.role %}"
    "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ name }}<|im_middle|>"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
"""What Kimi K2's template writes (no package ships it); a test compares it with the renderers package."""
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}"
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ system if loop.index0 == ns.last }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs have 9 characters') }}{% endif %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    "{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% endif %}{% endfor %}"
)
"""What Mistral Nemo's template writes; a test compares it with mistral_common."""
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
_GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
_TOOL_MARKS = ["begin", "end"]
MORE_FAMILIES: dict[str, tuple[list[str], list[str], str]] = {
    "gemma": (_GEMMA, [], "<eos>"),
    "gemma3": (_GEMMA, [], "<eos>"),
    "deepseekv3": (
        _DEEPSEEK,
        [
            *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>"),
            *(f"<｜tool▁{kind}▁{mark}｜>" for kind in ("calls", "call") for mark in _TOOL_MARKS),
        ],
        "<｜end▁of▁sentence｜>",
    ),
    "glm4moe": (
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        [*_MARKUP, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<|endoftext|>",
    ),
    "kimi": (
        [
            *("[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ],
        [],
        "[EOS]",
    ),
    "phi3": (["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], [], "<|endoftext|>"),
}
_BEGINNINGS = {"<|begin_of_text|>", "<bos>", "<｜begin▁of▁sentence｜>"}


def template(family: str) -> str:
    """The original jinja of a family, as the trl package ships it."""
    if family in ("smollm2", "kimi"):
        return SMOLLM2 if family == "smollm2" else KIMI
    folder = importlib.resources.files("trl") / "chat_templates"
    return (folder / f"{family}.jinja").read_text(encoding="utf-8")


@cache
def make_tokenizer(family: str) -> Any:
    """A byte-level BPE tokenizer of some 300 entries with the family's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special, ordinary, end = (FAMILIES | MORE_FAMILIES)[family]
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
        bos_token=next((token for token in special if token in _BEGINNINGS), None),
        extra_special_tokens=[t for t in special if t != end],
    )
    fast.chat_template = template(family)
    return fast


class TekkenTokenizer:
    """Mistral Nemo's own tokenizer out of mistral_common, with the template beside it."""

    chat_template = MISTRAL
    name_or_path = "tekken"

    def __init__(self) -> None:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        self.mistral = MistralTokenizer.v3(is_tekken=True)
        self._tekken: Any = self.mistral.instruct_tokenizer.tokenizer
        self.eos_token_id = self._tekken.eos_id
        names = (self._tekken.id_to_piece(i) for i in range(self._tekken.num_special_tokens))
        self._ids = {name: i for i, name in enumerate(names) if not name.startswith("<SPECIAL_")}
        self.all_special_tokens = list(self._ids)
        self.added_tokens_decoder = {i: name for name, i in self._ids.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")")

    def get_added_vocab(self) -> dict[str, int]:
        return self._ids

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._ids.get(token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for piece in filter(None, self._split.split(text)):
            known = self._ids.get(piece)
            ids += self._tekken.encode(piece, bos=False, eos=False) if known is None else [known]
        return ids

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        return str(self._tekken.decode(list(ids), special_token_policy=SpecialTokenPolicy.KEEP))

    def apply_chat_template(self, messages: Any, *, tools: Any = None, **variables: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert variables.pop("tokenize") is False
        texts, _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.chat_template,
            bos_token="<s>",
            eos_token="</s>",
            **variables,
        )
        return str(texts[0])


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(word[:k], word[k]) for word in words for k in range(1, len(word))]
    return list(dict.fromkeys(itertools.chain(pairs)))


def spelled(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The text token by token as single bytes: a tokenisation that ``encode`` does not choose."""
    return tuple(i for character in text for i in tokenizer.encode(character, add_special_tokens=False))
