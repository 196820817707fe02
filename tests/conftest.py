"""Fixtures that several rooms share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A shell that starts this in the background has it ignore ctrl-c, and so would every process under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Run by tests in processes of their own: importing them here would let Unsloth patch this process.
collect_ignore = [
    "unsloth_cases.py",
    "unsloth_gpu_attention.py",
    "plan_process.py",
    "stack_loop.py",
    "memory_limit_process.py",
]

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("artnb", deadline=None)
settings.load_profile("artnb")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that these tests belong to."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer with a ChatML template: 256 bytes and three special tokens, no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama in fp32: the mechanics of a model, none of its knowledge."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.12,  # large enough that every context token moves the next one's distribution
        tie_word_embeddings=True,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and threads that wait for each other slow the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Folder of the bundled model, converted on this machine's first use."""
    from artnb.bundled import bundled_model

    return bundled_model()
