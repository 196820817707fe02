"""Does anything that a stranger writes raise what nobody expects? Random texts and JSON at every door.

A door may refuse with its own error; anything else, a crash or a 500, is a defect. The default run tries a
hundred of each, ``slow`` twenty thousand.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from test_types import conversations, json_values, objects, texts, trajectories

import artnb as nb
from artnb import tool_calls
from artnb.chat_request import ChatError
from artnb.completions import ChatApp
from artnb.judging.answers import InvalidAnswer, parse_criteria, parse_scores
from artnb.parameters import parameters
from artnb.rendering import make_renderer
from artnb.store.codec import decode, encode
from artnb.ui.html import trajectory_html

many = pytest.mark.parametrize("cases", [100, pytest.param(20_000, marks=pytest.mark.slow)])


def try_all(cases: int, values: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    @settings(max_examples=cases, suppress_health_check=list(HealthCheck), database=None)
    @given(values)
    def attempt(value: Any) -> None:
        check(value)

    attempt()


# ---- trajectories ---------------------------------------------------------------------------------


DRAWN = {
    *("div", "details", "summary", "pre", "table", "tbody", "thead", "tr", "th", "td", "span", "b", "i"),
    *("em", "strong", "code", "p", "br", "small", "ul", "li"),
}
"""What a trajectory is drawn with."""


@many
def test_a_trajectory_comes_back_equal_and_is_drawn_as_text(cases: int):
    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen.add(tag)
            assert not [name for name, _ in attrs if name.startswith("on")]

    def check(trajectory: nb.Trajectory) -> None:
        assert nb.Trajectory.from_json(decode(encode(trajectory.to_json()))) == trajectory
        page = Tags()
        page.feed(trajectory_html(trajectory))
        assert page.seen <= DRAWN

    try_all(cases, trajectories, check)


_INLINE = (
    "span",
    "b",
    "i",
    "em",
    "strong",
    "code",
    "p",
    "br",
    "small",
    "tbody",
    "thead",
    "style",
    "ul",
    "li",
)

# ---- requests -------------------------------------------------------------------------------------

names = st.sampled_from(
    (
        *("model", "messages", "max_tokens", "temperature", "n", "stop", "tools", "stream", "logprobs"),
        *("seed", "top_p", "response_format", "tool_choice", "extra_body", "stream_options"),
        "max_completion_tokens",
    )
)
near_messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "tool", "x"]) | json_values,
            "content": texts | json_values,
            "tool_calls": st.lists(objects, max_size=2) | json_values,
            "name": texts,
            "tool_call_id": texts,
        },
    ),
    max_size=4,
)
bodies = json_values | st.builds(
    lambda more, messages: {"model": "agent", "max_tokens": 4, "messages": messages} | more,
    st.dictionaries(names, json_values, max_size=3),
    near_messages,
)


@many
def test_any_request_is_answered_or_refused_and_never_a_failure(cases: int):
    backend = nb.FakeBackend(script=lambda prompt, version: "a", max_context=100_000)
    app = ChatApp(backend, make_renderer(backend.tokenizer), model_name="agent")

    def check(body: Any) -> None:
        backend.requests.clear()
        asyncio.run(answer(body))

    async def answer(body: Any) -> None:
        reply = await app.reply("POST", "/v1/chat/completions", json.dumps(body).encode())
        assert reply.status in (200, 400, 404), reply.encode()
        if reply.chunks is None:
            json.loads(reply.encode())
        else:
            assert [event async for event in reply.events()][-1] == b"data: [DONE]\n\n"

    try_all(cases, bodies, check)


@many
def test_any_conversation_is_rendered_or_refused(cases: int):
    backend = nb.FakeBackend()
    app = ChatApp(backend, make_renderer(backend.tokenizer), model_name="agent")

    def check(items: list[Any]) -> None:
        messages = nb.History(items).messages()
        body = {"model": "agent", "max_tokens": 2, "messages": messages}
        try:
            asyncio.run(app.completions(body))
        except (ChatError, nb.RequestError):
            return

    try_all(cases, conversations(), check)


# ---- what models write ----------------------------------------------------------------------------

CALLS = (
    *('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", "</tool_call>", "{", "}", "["),
    *('"', "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "functions.f:0", "\\", "null", "1e999", "<|python_tag|>"),
)
written = st.lists(st.sampled_from(CALLS) | texts, max_size=8).map("".join)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@many
def test_any_answer_is_read_for_tool_calls(cases: int):
    parsers = [getattr(tool_calls, name) for name in dir(tool_calls) if name.startswith("parse_")]
    assert len(parsers) >= 6

    def check(text: str) -> None:
        for parse in parsers:
            for tools in ((), TOOLS):
                read = parse(text, tools)
                json.dumps([*read.calls])

    try_all(cases, written, check)


IDS = ("BCDF", "GHJK")
judged = st.lists(
    st.sampled_from(
        (
            *(
                '{"scores": [',
                "]}",
                '{"id": "BCDF", "score": 0.5, "explanation": "x"}',
                ",",
                "```json",
                "```",
            ),
            *('{"id": "GHJK", "score": 1}', '"id": "GHJK"', "NaN", "1e400", "-0.5", "true", '"0.7"', "\n"),
        )
    )
    | texts,
    max_size=8,
).map("".join)
almost = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.sampled_from(IDS) | json_values,
            "score": st.floats(0, 1) | json_values,
            "explanation": json_values,
            "answers": json_values,
        },
    ),
    max_size=3,
).map(lambda entries: json.dumps({"scores": entries}))


@many
def test_a_judge_s_answer_is_whole_and_in_range_or_refused(cases: int):
    def check(text: str) -> None:
        for parse in (lambda: parse_scores(text, IDS), lambda: parse_criteria(text, IDS, ["a", "b"])):
            try:
                scores = parse()
            except InvalidAnswer as error:
                assert str(error)
                continue
            assert set(scores) == set(IDS)
            assert all(math.isfinite(s.value) and 0 <= s.value <= 1 for s in scores.values())

    try_all(cases, judged | almost, check)


# ---- parameters -----------------------------------------------------------------------------------


@many
def test_parameters_are_checked_or_refused(cases: int):
    known = st.sampled_from(["steps", "group_size", "learning_rate", "seed", "run_name", "base", "out_dir"])

    def check(given: dict[str, Any]) -> None:
        try:
            checked = parameters(**given)
        except nb.ConfigurationError as error:
            assert str(error)
            return
        assert vars(checked).keys() >= given.keys()

    try_all(cases, st.dictionaries(known | texts, json_values, max_size=3), check)
