"""OpenAI's chat completions over a backend: what comes back, and what is refused."""

import asyncio
import copy
import itertools
import json

import pytest
from chat_tokenizers import make_tokenizer

from artnb.backends.fake import FakeBackend
from artnb.completions import ChatApp, ChatError
from artnb.config import SamplingConfig
from artnb.errors import NonFiniteLogits
from artnb.recording import recording
from artnb.rendering import make_renderer
from artnb.types import Turn

ASK = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "kite"}}\n</tool_call>'


def make_app(script=None, sampling=None, **options):
    backend = FakeBackend(script=script, **options)
    app = ChatApp(
        backend, make_renderer(backend.tokenizer, backend.base_model), model_name="agent", sampling=sampling
    )
    return app, backend


async def ask(app, messages=ASK, **more):
    return await app.completions({"model": "agent", "messages": messages, **more})


async def refusal(app, **body):
    with pytest.raises(ChatError) as caught:
        await app.completions({"model": "agent", "messages": ASK, **body})
    return caught.value


def turn_of(choice):
    return Turn.from_json(choice["artnb"])


async def test_a_choice_carries_the_exact_turn():
    app, backend = make_app(["hi"])
    completion = await ask(app, seed=5, temperature=0.5)
    choice, request = completion["choices"][0], backend.requests[0]
    turn = turn_of(choice)
    assert choice["message"] == {"role": "assistant", "content": "hi"}
    assert choice["finish_reason"] == turn.finish_reason == "stop"
    assert turn.prompt_ids == choice["prompt_token_ids"] == request.prompt_ids
    assert turn.completion_ids == choice["token_ids"] == (104, 105, 257)
    assert len(turn.logprobs) == 3 and choice["policy_version"] == turn.policy_version == 0
    assert turn.sampling["seed"] == 5 and turn.sampling["temperature"] == 0.5
    assert set(turn.timing) == {"started", "queued", "seconds"}
    assert completion["usage"] == {
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": 3,
        "total_tokens": len(request.prompt_ids) + 3,
    }


async def test_the_next_prompt_extends_the_tokens_so_far():
    app, _ = make_app(["first", "second", "third"])
    messages, turns = list(ASK), []
    for _ in range(3):
        choice = (await ask(app, messages))["choices"][0]
        turns.append(turn_of(choice))
        messages += [{"role": "assistant", "content": choice["message"]["content"]}, *ASK]
    for earlier, later in itertools.pairwise(turns):
        assert later.prompt_ids[: len(earlier.ids)] == earlier.ids


async def test_an_edited_conversation_is_rendered_afresh():
    app, backend = make_app(["first", "second"])
    choice = (await ask(app))["choices"][0]
    edited = [*ASK, {"role": "assistant", "content": "edited"}, *ASK]
    prompt = turn_of((await ask(app, edited))["choices"][0]).prompt_ids
    assert prompt[: len(turn_of(choice).ids)] != turn_of(choice).ids
    assert backend.tokenizer.decode(prompt).count("edited") == 1


async def test_a_recording_prefers_its_own_tokens_of_the_same_text():
    """Two attempts sample the same text in different tokens; each goes on with its own."""
    tokenizer = make_tokenizer("smollm2")
    backend = FakeBackend(tokenizer)
    app = ChatApp(backend, make_renderer(tokenizer), model_name="agent")
    spellings = iter(["hello", "h e l l o"])

    def reply(request, *_):
        ids = [i for piece in next(spellings).split() for i in tokenizer.encode(piece)]
        return (*ids, tokenizer.eos_token_id), "stop"

    async def attempt():
        with recording():
            first = turn_of((await ask(app))["choices"][0])
            await both.wait()
            again = [*ASK, first.message, *ASK]
            prompt = app._prompt(read(app, again)).ids
            assert prompt[: len(first.ids)] == first.ids
            return first

    def read(app, messages):
        from artnb.chat_request import read_request

        return read_request({"model": "agent", "messages": messages}, app.sampling)

    backend._reply = reply
    both = asyncio.Barrier(2)
    one, other = await asyncio.gather(attempt(), attempt())
    assert one.message == other.message and one.completion_ids != other.completion_ids


async def test_tool_calls_come_back_parsed_and_go_on():
    app, backend = make_app([CALL, "17"])
    choice = (await ask(app, tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert call["function"] == {"name": "price", "arguments": '{"item": "kite"}'}
    messages = [*ASK, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "17"}]
    after = turn_of((await ask(app, messages, tools=TOOLS))["choices"][0])
    assert after.prompt_ids[: len(turn_of(choice).ids)] == turn_of(choice).ids
    assert backend.tokenizer.decode(after.prompt_ids).count('{"name": "price", "arguments"') == 1


async def test_a_malformed_call_is_text_and_is_reported():
    app, _ = make_app(["<tool_call>oops</tool_call>"])
    choice = (await ask(app, tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<tool_call>oops</tool_call>"
    assert "not JSON" in choice["message"]["tool_call_error"]


async def test_tool_choice_none_reads_no_call_and_keeps_the_prompt():
    app, backend = make_app([CALL])
    choice = (await ask(app, tools=TOOLS, tool_choice="none"))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    await ask(app, tools=TOOLS)
    assert backend.requests[0].prompt_ids == backend.requests[1].prompt_ids


async def test_a_stop_string_ends_the_text_but_not_the_tokens():
    app, backend = make_app(["<call>kite</call> and more"])
    choice = (await ask(app, stop=["</call>"]))["choices"][0]
    assert choice["message"]["content"] == "<call>kite" and choice["finish_reason"] == "stop"
    assert backend.tokenizer.decode(choice["token_ids"]) == "<call>kite</call>"
    again = [*ASK, choice["message"], *ASK]
    prompt = backend.tokenizer.decode(turn_of((await ask(app, again))["choices"][0]).prompt_ids)
    assert "<call>kite</call><|im_end|>\n<|im_start|>user" in prompt


async def test_n_choices_differ_by_seed():
    app, backend = make_app()
    choices = (await ask(app, n=3, seed=7))["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert [r.sampling.seed for r in backend.requests] == [7, 8, 9]
    assert turn_of((await ask(app, seed=8))["choices"][0]).completion_ids == choices[1]["token_ids"]


async def test_the_app_s_sampling_stands_in_for_what_a_request_leaves_out():
    app, backend = make_app(sampling=SamplingConfig(temperature=0.3, max_tokens=11, stop="x"))
    await ask(app)
    await ask(app, temperature=0.0, max_tokens=2, max_completion_tokens=3, stop=[], top_k=4, min_p=0.1)
    one, other = (r.sampling for r in backend.requests)
    assert (one.temperature, one.max_tokens, one.stop) == (0.3, 11, ("x",))
    assert (other.temperature, other.max_tokens, other.stop) == (0.0, 3, ())
    assert (other.top_k, other.min_p) == (4, 0.1)


async def test_logprobs_are_reported_for_each_token():
    app, _ = make_app(["é"])
    entries = (await ask(app, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert len(entries) == 3 and all(len(e["top_logprobs"]) == 2 for e in entries)
    assert entries[2]["token"] == "<|im_end|>"
    assert entries[2]["logprob"] == entries[2]["top_logprobs"][0]["logprob"] < 0
    assert (await ask(app))["choices"][0]["logprobs"] is None


async def test_a_stream_spells_the_same_answer_and_ends_with_the_turn():
    app, _ = make_app([f"{'long ' * 20}{CALL}"])
    body = {"model": "agent", "messages": ASK, "tools": TOOLS, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in app.stream(body)]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]]
    assert "".join(pieces) == ("long " * 20).strip() and sum(map(bool, pieces)) > 1
    assert chunks[-3]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "price"
    last = chunks[-2]["choices"][0]
    assert last["finish_reason"] == "tool_calls" and turn_of(last).finish_reason == "tool_calls"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 1


async def test_a_stream_comes_as_it_is_sampled_and_adds_up_exactly():
    app, backend = make_app(["One two three four é five."], delay=1.0)
    arrived = []
    async for chunk in app.stream({"model": "agent", "messages": ASK}):
        arrived.append((backend.active, chunk["choices"][0]["delta"].get("content", "")))
    early = "".join(text for active, text in arrived if active)
    assert early.startswith("One two") and len([text for active, text in arrived if active and text]) > 3
    assert "".join(text for _, text in arrived) == "One two three four é five." and "\ufffd" not in early


@pytest.mark.parametrize(
    ("reply", "options"),
    [
        (f"I ask the shop. {CALL}", {"tools": TOOLS}),
        ("it is <call>kite</call> and more", {"stop": ["</call>"]}),
        ("  spaced out \n\n ", {}),
        ("a < b and </thi", {}),
        ("{not json} at all", {"tools": TOOLS}),
        ("cut off in the mid\u00e9", {"max_tokens": 19}),
    ],
)
async def test_a_stream_tells_nothing_that_it_would_have_to_take_back(reply, options):
    app, _ = make_app([reply], delay=0.4)
    whole = (await ask(app, **options))["choices"][0]
    chunks = [c["choices"][0] async for c in app.stream({"model": "agent", "messages": ASK, **options})]
    assert "".join(c["delta"].get("content", "") for c in chunks) == whole["message"]["content"]
    calls = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
    assert len(calls) == len(whole["message"].get("tool_calls", []))
    assert turn_of(chunks[-1]).completion_ids == turn_of(whole).completion_ids


@pytest.mark.parametrize("opens", [False, True])
async def test_a_stream_tells_thinking_apart(opens):
    thinking = "First I think.\nThen I know."
    tokenizer = copy.deepcopy(make_tokenizer("qwen3"))
    if opens:
        tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    reply = f"{'' if opens else '<think>'}{thinking}</think>It is four."
    app, _ = make_app([reply], tokenizer=tokenizer, delay=0.4)
    chunks = [c["choices"][0] async for c in app.stream({"model": "agent", "messages": ASK})]
    told = {name: [c["delta"].get(name, "") for c in chunks] for name in ("reasoning_content", "content")}
    assert {name: "".join(texts) for name, texts in told.items()} == {
        "reasoning_content": thinking,
        "content": "It is four.",
    }
    assert sum(map(bool, told["reasoning_content"])) > 1


async def test_choices_are_streamed_side_by_side():
    app, _ = make_app(["one and all", "two and all"], delay=0.3)
    texts = ["", ""]
    async for chunk in app.stream({"model": "agent", "messages": ASK, "n": 2}):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert sorted(texts) == ["one and all", "two and all"]


async def test_who_stops_reading_a_stream_stops_the_sampling():
    app, backend = make_app(["many words to say"], delay=60)
    chunks = app.stream({"model": "agent", "messages": ASK})
    assert (await anext(chunks))["choices"][0]["delta"]["role"] == "assistant" and backend.active == 1
    await chunks.aclose()
    assert (backend.active, backend.cancelled) == (0, 1)


async def test_a_stream_that_cannot_begin_is_an_error_with_a_status_and_one_that_breaks_says_so(caplog):
    app, backend = make_app(["many words to say"], delay=0.2)
    too_long = json.dumps({"model": "agent", "messages": ASK, "stream": True, "max_tokens": 10**6})
    reply = await app.reply("POST", "/v1/chat/completions", too_long.encode())
    assert (reply.status, reply.chunks) == (400, None)
    tell = backend._tell

    async def broken(request, ids):
        await tell(request, ids[:3])
        raise RuntimeError("the engine died")

    backend._tell = broken
    body = json.dumps({"model": "agent", "messages": ASK, "stream": True}).encode()
    events = [event async for event in (await app.reply("POST", "/v1/chat/completions", body)).events()]
    assert b"the engine died" in events[-2] and b'"error"' in events[-2] and events[-1] == b"data: [DONE]\n\n"
    assert "the engine died" in caplog.text


async def test_policies_are_reached_by_name():
    app, backend = make_app()
    await backend.publish_weights(1)
    versions = [
        (await ask(app, model=name))["choices"][0]["policy_version"]
        for name in ("agent", "agent@base", "agent@step_000000")
    ]
    assert versions == [1, -1, 0]
    assert [m["id"] for m in app.models()["data"]] == ["agent", "agent@base"]


@pytest.mark.parametrize("name", ["gpt-4", "agent@nonsense", "agent@step_000099"])
async def test_an_unknown_model_is_not_found_and_the_known_are_named(name):
    app, _ = make_app()
    error = await refusal(app, model=name)
    assert (error.status, error.code) == (404, "model_not_found")
    assert "agent, agent@base" in str(error)
    assert error.body()["error"]["type"] == "invalid_request_error"


async def test_an_over_long_prompt_says_the_limit_and_what_was_asked():
    app, backend = make_app(max_context=40)
    error = await refusal(app, max_tokens=30)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "holds 40 tokens; the prompt has 24 and 30 more" in str(error)
    await ask(app)
    assert backend.requests[0].sampling.max_tokens == 16  # what fits, when nothing was asked
    error = await refusal(app, messages=[{"role": "user", "content": "x" * 40}])
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("param", "value", "says"),
    [
        ("temperature", -1, ">= 0"),
        ("temperature", "hot", "a number"),
        ("temperature", float("nan"), ">= 0"),
        ("top_p", 0, "(0, 1]"),
        ("top_k", -2, ">= 0"),
        ("min_p", 1.5, "[0, 1)"),
        ("max_tokens", 0, ">= 1"),
        ("max_completion_tokens", True, "whole number"),
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("seed", "x", "whole number"),
        ("stop", [""], "empty"),
        ("stop", ["s"] * 17, "at most 16"),
        ("stream", "yes", "true or false"),
        ("top_logprobs", 3, "logprobs=true"),
        ("response_format", {"type": "yaml"}, "json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "schema"),
        ("structured_outputs", {"grammar": "x"}, "one of json"),
        ("structured_outputs", {"regex": "x", "choice": ["x"]}, "one of json"),
        ("structured_outputs", {"choice": "x"}, "one of json"),
        ("tool_choice", "required", "cannot force"),
        ("tool_choice", {"type": "function", "function": {"name": "price"}}, "cannot force"),
        ("frequency_penalty", 0.5, "not supported"),
        ("topk", 3, "unknown parameter"),
        ("messages", [], "at least one"),
    ],
)
async def test_a_bad_parameter_is_named_with_its_limit(param, value, says):
    app, backend = make_app()
    error = await refusal(app, **{param: value})
    assert (error.status, error.param) == (400, param)
    assert says in str(error)
    assert not backend.requests


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls"),
    ],
)
async def test_a_bad_message_is_pointed_at(message, param):
    app, _ = make_app()
    assert (await refusal(app, messages=[message])).param == param


async def test_parameters_that_change_nothing_are_accepted():
    app, _ = make_app()
    await ask(app, user="me", frequency_penalty=0, logit_bias={}, stop=None, response_format={"type": "text"})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, {"regex": "[0-9]+"}),
        ({"structured_outputs": {"choice": ["up", "down"]}}, {"choice": ["up", "down"]}),
    ],
)
async def test_a_form_reaches_the_engine_and_stays_on_the_turn(parameters, form):
    app, backend = make_app()
    completion = await ask(app, **parameters)
    assert backend.requests[0].structured == form
    assert turn_of(completion["choices"][0]).sampling.get("structured") == form


async def test_two_forms_at_once_are_refused():
    app, _ = make_app()
    error = await refusal(
        app, response_format={"type": "json_object"}, structured_outputs={"choice": ["up", "down"]}
    )
    assert (error.status, error.param) == (400, "structured_outputs")


async def test_non_finite_logits_are_a_server_error():
    def script(prompt, version):
        raise NonFiniteLogits("request abc: the logits hold NaN")

    app, _ = make_app(script)
    error = await refusal(app)
    assert error.status == 500 and "NaN" in str(error)


@pytest.mark.parametrize("n", [1, 4])
async def test_cancelling_the_call_cancels_the_sampling(n):
    app, backend = make_app(delay=60)
    task = asyncio.create_task(ask(app, n=n))
    while backend.active < n:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (backend.active, backend.cancelled) == (0, n)


async def test_one_failing_choice_cancels_its_siblings():
    app, backend = make_app(delay=60)
    sample = backend.sample

    async def failing(request, *, policy="current"):
        if request.sampling.seed == 2:
            await asyncio.sleep(0)
            raise NonFiniteLogits("NaN")
        return await sample(request, policy=policy)

    backend.sample = failing
    error = await refusal(app, n=3, seed=1)
    assert error.status == 500
    assert (backend.active, backend.cancelled) == (0, 2)


async def test_every_choice_is_recorded():
    app, _ = make_app()
    with recording() as recorder:
        completion = await ask(app, n=2)
    assert [call.turn for call in recorder.calls] == [turn_of(c) for c in completion["choices"]]
    assert recorder.calls[0].messages == ASK


async def test_replies_are_http_without_the_http(caplog):
    app, backend = make_app()
    body = json.dumps({"model": "agent", "messages": ASK}).encode()
    assert (await app.reply("POST", "/v1/chat/completions", body)).status == 200
    assert (await app.reply("POST", "/v1/chat/completions", b"{")).status == 400
    assert (await app.reply("POST", "/v1/chat/completions", b"[]")).status == 400
    assert (await app.reply("GET", "/v1/models", b"")).body["object"] == "list"
    assert (await app.reply("GET", "/v1/models/agent", b"")).body["id"] == "agent"
    assert (await app.reply("GET", "/v1/embeddings", b"")).status == 404
    backend.sample = None
    broken = await app.reply("POST", "/v1/chat/completions", body)
    assert broken.status == 500 and broken.body["error"]["message"].startswith("TypeError")
    assert "a chat completion failed" in caplog.text


async def test_thinking_that_a_client_forgets_is_still_known():
    """Qwen3 keeps its thinking through a tool cycle, and drops it at the next question."""
    tokenizer = make_tokenizer("qwen3")
    thought = "<think>\nlook\n</think>\n\n" + CALL
    backend = FakeBackend(tokenizer, [thought, "17", "bye"])
    app = ChatApp(backend, make_renderer(tokenizer), model_name="agent")
    first = (await ask(app, tools=TOOLS))["choices"][0]
    call = first["message"]["tool_calls"]
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": call},  # no reasoning_content
        {"role": "tool", "tool_call_id": call[0]["id"], "content": "17"},
    ]
    second = turn_of((await ask(app, messages, tools=TOOLS))["choices"][0])
    assert second.prompt_ids[: len(turn_of(first).ids)] == turn_of(first).ids
    messages += [{"role": "assistant", "content": "17"}, *ASK]
    third = turn_of((await ask(app, messages, tools=TOOLS))["choices"][0])
    assert "look" not in tokenizer.decode(third.prompt_ids)
