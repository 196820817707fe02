"""How do messages become tokens, and tokens messages, for one tokenizer?

One path serves training, the client, evaluation and the browser. Families that the ``renderers``
package knows are rendered by it; every other tokenizer by its own chat template. ``bridge`` extends
the exact tokens of the conversation so far, so that a model's own turns are never tokenised again.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from artnb.chat_template import UnknownTemplateWarning, inspect_template, plain_message
from artnb.errors import ConfigurationError, RequestError
from artnb.prompt_memory import PromptMemory
from artnb.tool_calls import CALL_MARKUP, Parser, make_call
from artnb.types import Message

__all__ = [
    "ParsedMessage",
    "PromptMemory",
    "Renderer",
    "TemplateRenderer",
    "TypedRenderer",
    "UnknownTemplateWarning",
    "make_renderer",
]

Tools = Sequence[dict[str, Any]]
_PLACEHOLDER = "ARTNB-OWN-TURN"
_THINKING = "ARTNB-EARLIER-THINKING"
_RESULT: Message = {"role": "tool", "tool_call_id": "artnb0000", "content": "?"}
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_MARKUP = {"<think>", "</think>"} | CALL_MARKUP


@dataclass(frozen=True)
class ParsedMessage:
    """An assistant message read from sampled tokens."""

    message: Message
    """role, content (a string, perhaps empty), and where there are any reasoning_content, tool_calls."""
    tool_call_error: str | None = None
    """What is wrong with a call that could not be read; its text stays in the content."""


class Renderer(Protocol):
    """Messages to tokens and back, for one tokenizer."""

    name: str
    stop_ids: tuple[int, ...]
    """Token ids that end an assistant turn."""
    scope: str
    """Unique to this renderer: tokens of another one never continue its conversations."""
    not_guaranteed: tuple[str, ...]
    """What no test covers for this model's template, in sentences; empty for the families tested."""

    def render(
        self, messages: Sequence[Message], tools: Tools | None = None, *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Tokens of a conversation, made afresh. Raises RequestError when the template refuses it."""
        ...

    def bridge(
        self,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[int, ...] | None:
        """The next prompt as an extension of a finished turn's own tokens.

        ``previous_messages`` end with that turn's message. A turn that was cut off gets its missing
        end-of-turn token as context. None when the tokens cannot be extended faithfully, for example
        because the template drops earlier thinking: render afresh then, and train on two rows.
        """
        ...

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Tools | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> ParsedMessage:
        """Read sampled tokens. Text from the first stop string on is left out; calls are looked for
        only when there are tools."""
        ...


def make_renderer(
    tokenizer: Any, base_model: str = "", *, template_kwargs: Mapping[str, Any] | None = None
) -> Renderer:
    """The best renderer for this tokenizer; ``base_model`` is a Hugging Face id or a folder.

    ``template_kwargs`` are variables of the chat template, such as ``enable_thinking=False``; with
    them the template itself writes. Warns with UnknownTemplateWarning of what is not guaranteed.
    """
    typed = None if template_kwargs else _typed_renderer(tokenizer, base_model)
    if typed is not None:
        return typed
    renderer = TemplateRenderer(tokenizer, template_kwargs)
    if renderer.not_guaranteed:
        limits = "; ".join(renderer.not_guaranteed)
        name = base_model or getattr(tokenizer, "name_or_path", "") or "this tokenizer"
        message = f"the chat template of {name} is not fully covered: {limits}."
        warnings.warn(message, UnknownTemplateWarning, stacklevel=2)
    return renderer


class TemplateRenderer:
    """Any tokenizer with a chat template; see Renderer."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                "this tokenizer has no chat template, so chat messages cannot become tokens. "
                "Use an instruction-tuned model, or set tokenizer.chat_template."
            )
        self.name = "template"
        self.scope = uuid.uuid4().hex
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        named = tokenizer.chat_template  # one template, or several by name
        template = named if isinstance(named, str) else "\n".join(named.values())
        self._template = inspect_template(template, self._write)
        self.not_guaranteed = self._template.not_guaranteed
        specials = sorted(set(tokenizer.all_special_tokens) - _MARKUP, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._thinks = "</think>" in template
        question = {"role": "user", "content": "?"}
        self._think_opened = self._thinks and self._text([question]).rstrip().endswith("<think>")
        ends = self._ends(question)
        self._openers = () if ends else self._ends(question, question) + self._ends(question, _RESULT)
        """GLM ends no turn: the model goes on with the token that opens the next message."""
        self.stop_ids = self._find_stop_ids([*dict.fromkeys((*ends, *self._openers))])

    def _ends(self, question: Message, *new: Message) -> tuple[int, ...]:
        """The first special token after an answer."""
        messages = [question, {"role": "assistant", "content": _PLACEHOLDER}, *new]
        special = set(getattr(self._tokenizer, "added_tokens_decoder", {})) | {self._tokenizer.eos_token_id}
        with contextlib.suppress(RequestError):
            tail = self._text(messages, add_generation_prompt=False).rpartition(_PLACEHOLDER)[2]
            return tuple(i for i in self._encode(tail) if i in special)[:1]
        return ()

    def _find_stop_ids(self, ends: list[int]) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        known = set(_ENDS) & set(self._tokenizer.all_special_tokens)
        for other in (eos, *sorted(map(self._tokenizer.convert_tokens_to_ids, known))):
            if other is not None and other not in ends:
                ends.append(other)
        if not ends:
            raise ConfigurationError(
                "neither the chat template nor the tokenizer names a token that ends a turn; "
                "set tokenizer.eos_token"
            )
        return tuple(ends)

    def render(
        self, messages: Sequence[Message], tools: Tools | None = None, *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        return self._encode(self._text(messages, tools, add_generation_prompt=add_generation_prompt))

    def bridge(
        self,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[int, ...] | None:
        before = previous_messages[:-1]
        placeholder = {"role": "assistant", "content": _PLACEHOLDER}
        with contextlib.suppress(RequestError):
            if self._drops_thinking(previous_messages, new_messages, tools):
                return None
            text = self._text([*before, placeholder, *new_messages], tools)
            _, found, tail_text = text.rpartition(_PLACEHOLDER)
            tail = self._encode(tail_text)
            end = next((k for k, i in enumerate(tail) if i in self.stop_ids), None)
            if not found or end is None or not self._begins(text, before, tools):
                return None
            if completion_ids and completion_ids[-1] in self.stop_ids:
                if tail[end] in self._openers and completion_ids[-1] != tail[end]:
                    return None  # the model opened another message than the one that came
                tail = tail[end + 1 :]  # the model ended the turn itself
            return (*prompt_ids, *completion_ids, *tail)
        return None

    def _begins(self, text: str, before: Sequence[Message], tools: Tools | None) -> bool:
        """True when the text goes on as the prompt began.

        Mistral's template writes the tools before the last question, so it moves them: what it wrote
        into an earlier prompt would then stand twice.
        """
        return not before or any(
            text.startswith(self._text(before, tools, add_generation_prompt=asked)) for asked in (False, True)
        )

    def _drops_thinking(
        self, previous: Sequence[Message], new: Sequence[Message], tools: Tools | None
    ) -> bool:
        """True when the template would leave out thinking that the model's own tokens contain."""
        if not self._thinks or not any(m.get("reasoning_content") for m in previous):
            return False
        marked = [
            {**m, "reasoning_content": _THINKING} if m.get("reasoning_content") else m for m in previous
        ]
        shown = self._text([*marked, *new], tools).count(_THINKING)
        return shown < sum(bool(m.get("reasoning_content")) for m in previous)

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Tools | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> ParsedMessage:
        text = self._decode(completion_ids)
        reasoning, text = self._split_reasoning(text)
        text = cut_at_stop(text, stop)
        return _parsed_message(reasoning, *_calls_of(self._template.parse_calls, text, tools))

    def _split_reasoning(self, text: str) -> tuple[str | None, str]:
        opened = text.lstrip().startswith("<think>")
        if not self._thinks or not (opened or self._think_opened):
            return None, text
        body = text.lstrip().removeprefix("<think>") if opened else text
        reasoning, _, rest = body.partition("</think>")
        return reasoning.strip("\n"), rest.lstrip("\n")

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return self._specials.sub("", text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(
        self, messages: Sequence[Message], tools: Tools | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        plain, tools = self._template.prepare(messages, tools)
        return self._write(plain, tools, add_generation_prompt=add_generation_prompt)

    def _write(
        self, plain: list[Message], tools: Tools | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                plain,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except _template_errors() as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


class TypedRenderer:
    """A family that the ``renderers`` package knows by name; see Renderer."""

    not_guaranteed: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, renderer: Any, keeping: Any) -> None:
        self.name = renderer.config.name
        self.scope = uuid.uuid4().hex
        self.stop_ids = tuple(renderer.get_stop_token_ids())
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._keeping = keeping
        """The same renderer, told to bridge across user messages: right while nobody has thought."""

    def render(
        self, messages: Sequence[Message], tools: Tools | None = None, *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        try:
            ids = self._renderer.render_ids(
                [plain_message(m) for m in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except (ValueError, TypeError, KeyError, NotImplementedError) as error:
            raise RequestError(f"the model's renderer refuses these messages: {error}") from error
        return tuple(ids)

    def bridge(
        self,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[int, ...] | None:
        has_thought = any(m.get("reasoning_content") for m in previous_messages)
        renderer = self._renderer if has_thought else self._keeping
        try:
            rendered = renderer.bridge_to_next_turn(
                list(prompt_ids),
                list(completion_ids),
                [plain_message(m) for m in new_messages],
                tools=list(tools) if tools else None,
            )
        except (ValueError, TypeError, KeyError, NotImplementedError):
            return None  # rendering afresh says what is wrong, if anything is
        own = (*prompt_ids, *completion_ids)
        if rendered is None or tuple(rendered.token_ids[: len(own)]) != own:
            return None
        return tuple(rendered.token_ids)

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Tools | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> ParsedMessage:
        ids = list(completion_ids)
        parsed = self._renderer.parse_response(
            ids, tools=list(tools) if tools else None, prompt_ids=list(prompt_ids) or None
        )
        content, calls, errors = parsed.content, [], []
        for call in parsed.tool_calls:
            if tools and call.status == "ok" and call.name:
                calls.append(make_call(call.name, call.arguments or {}))
                continue
            span = ids[slice(*call.token_span)] if call.token_span else None
            raw = self._tokenizer.decode(span, skip_special_tokens=False) if span else call.raw
            content = f"{content}\n{raw}".lstrip()
            if tools:
                errors.append(f"the tool call cannot be read ({call.status}): {call.raw}")
        reasoning = parsed.reasoning_content
        return _parsed_message(reasoning, cut_at_stop(content, stop), calls, "; ".join(errors) or None)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string.

    >>> cut_at_stop("<call>kite</call> and", ["</call>"])
    '<call>kite'
    """
    positions = [p for p in (text.find(s) for s in stop) if p >= 0]
    return text[: min(positions)] if positions else text


def _calls_of(parse: Parser, text: str, tools: Tools | None) -> tuple[str, list[dict[str, Any]], str | None]:
    if not tools:
        return text, [], None
    parsed = parse(text, tools)
    return parsed.content, parsed.calls, parsed.error


def _parsed_message(
    reasoning: str | None, content: str, calls: list[dict[str, Any]], error: str | None
) -> ParsedMessage:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return ParsedMessage(message, error)


def _template_errors() -> tuple[type[Exception], ...]:
    errors: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError)
    with contextlib.suppress(ModuleNotFoundError):  # FakeBackend's tokenizer renders without jinja
        from jinja2 import TemplateError

        errors += (TemplateError,)
    return errors


def _typed_renderer(tokenizer: Any, base_model: str) -> TypedRenderer | None:
    """The renderer registered for exactly this model id, if it writes what the template writes."""
    if "/" not in base_model or os.path.isdir(base_model):
        return None
    try:
        from renderers.base import MODEL_RENDERER_MAP, create_renderer
        from renderers.configs import config_from_name
    except ModuleNotFoundError:
        return None
    config = config_from_name(MODEL_RENDERER_MAP.get(base_model, "auto"))
    if config is None:
        return None
    try:
        renderer = create_renderer(tokenizer, config)
        keeping = create_renderer(tokenizer, type(config)(thinking_retention="all"))
        own = renderer.render_ids(_PROBE, add_generation_prompt=True)
    except (AssertionError, ValueError):
        return None  # this tokenizer lacks the family's special tokens
    if _after_question(tokenizer, own) != _after_question(
        tokenizer, TemplateRenderer(tokenizer).render(_PROBE)
    ):
        return None  # somebody changed the chat template
    return TypedRenderer(tokenizer, renderer, keeping)


_PROBE: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "artnb asks"},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "more"},
]


def _after_question(tokenizer: Any, ids: Sequence[int]) -> str:
    """The rendered probe from its question on; system blocks may hold today's date."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.partition(_PROBE[1]["content"])[2]
