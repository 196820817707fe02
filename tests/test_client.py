"""The real openai client, in process and over loopback."""

import asyncio
import socket
import threading
import time

import openai
import pytest

from artnb.backends.fake import FakeBackend
from artnb.client import async_client, sync_client
from artnb.completions import ChatApp
from artnb.errors import ArtnbError
from artnb.recording import recording
from artnb.rendering import make_renderer
from artnb.serve import serve
from artnb.types import Trajectory, Turn

ASK = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]


def make_app(script=("hi",), **options):
    backend = FakeBackend(script=script, **options)
    return ChatApp(backend, make_renderer(backend.tokenizer), model_name="agent"), backend


async def test_it_answers_without_a_socket(monkeypatch):
    def no_socket(*_, **__):
        raise AssertionError("the in-process client opened a socket")

    app, _ = make_app()
    client = async_client(app)
    monkeypatch.setattr(socket.socket, "connect", no_socket)
    completion = await client.chat.completions.create(model="agent", messages=ASK)
    assert isinstance(completion, openai.types.chat.ChatCompletion)
    choice = completion.choices[0]
    turn = Turn.from_choice(choice)
    assert choice.message.content == "hi" and turn.message == {"role": "assistant", "content": "hi"}
    assert list(turn.prompt_ids) == choice.model_extra["prompt_token_ids"]
    assert [m.id async for m in client.models.list()] == ["agent", "agent@base"]


async def test_choices_go_straight_back_into_the_conversation():
    app, _ = make_app(("one", "two"))
    client = async_client(app)
    trajectory = Trajectory(list(ASK))
    for _ in range(2):
        completion = await client.chat.completions.create(model="agent", messages=trajectory.messages())
        trajectory.messages_and_choices += [completion.choices[0], *ASK]
    first, second = trajectory.finish().turns
    assert second.prompt_ids[: len(first.ids)] == first.ids
    as_objects = [*ASK, completion.choices[0].message, *ASK]
    assert (await client.chat.completions.create(model="agent", messages=as_objects)).choices


async def test_tools_streams_and_extras_pass_through():
    call = '<tool_call>{"name": "price", "arguments": {}}</tool_call>'
    app, backend = make_app((call, "abc " * 20))
    client = async_client(app)
    completion = await client.chat.completions.create(
        model="agent", messages=ASK, tools=TOOLS, extra_body={"top_k": 3, "min_p": 0.1}
    )
    assert completion.choices[0].message.tool_calls[0].function.name == "price"
    assert (backend.requests[0].sampling.top_k, backend.requests[0].sampling.min_p) == (3, 0.1)
    text, last = "", None
    async for chunk in await client.chat.completions.create(model="agent", messages=ASK, stream=True):
        text += chunk.choices[0].delta.content or ""
        last = chunk.choices[0]
    assert text == "abc " * 20
    assert Turn.from_choice(last).message["content"] == text


async def test_a_stream_arrives_while_it_is_sampled_and_ends_when_nobody_reads_it():
    app, backend = make_app(("abc " * 20,), delay=1.0)
    client = async_client(app)
    seen = []
    with recording() as recorder:
        async for chunk in await client.chat.completions.create(model="agent", messages=ASK, stream=True):
            seen.append((backend.active, chunk.choices[0].delta.content or ""))
    assert "".join(text for _, text in seen) == "abc " * 20
    assert len([text for active, text in seen if active and text]) > 3
    assert [call.turn.message["content"] for call in recorder.calls] == ["abc " * 20]
    stream = await client.chat.completions.create(model="agent", messages=ASK, stream=True)
    async for _ in stream:
        break
    await stream.close()
    assert (backend.active, backend.cancelled) == (0, 1)


def test_the_sync_client_streams_as_well():
    app, backend = make_app(("abc " * 20,), delay=1.0)
    client = sync_client(app, lambda: None)
    seen = []
    for chunk in client.chat.completions.create(model="agent", messages=ASK, stream=True):
        seen.append((backend.active, chunk.choices[0].delta.content or ""))
    assert "".join(text for _, text in seen) == "abc " * 20
    assert len([text for active, text in seen if active and text]) > 3
    with client.chat.completions.create(model="agent", messages=ASK, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 5
    while backend.active and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (backend.active, backend.cancelled) == (0, 1)
    client.close()


async def test_a_stream_that_breaks_is_an_error_of_openai_s():
    app, backend = make_app(("abc " * 20,), delay=0.2)

    async def broken(request, ids):
        request.on_token(ids[0])
        await asyncio.sleep(0.1)
        raise RuntimeError("the engine died")

    backend._tell = broken
    with pytest.raises(openai.APIError, match="the engine died"):
        async for _ in await async_client(app).chat.completions.create(
            model="agent", messages=ASK, stream=True
        ):
            pass


async def test_mistakes_are_openai_s_errors():
    app, _ = make_app(max_context=64)
    client = async_client(app)
    with pytest.raises(openai.NotFoundError, match="known: agent, agent@base") as missing:
        await client.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="holds 64 tokens") as long:
        await client.chat.completions.create(model="agent", messages=ASK, max_tokens=60)
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="temperature must be >= 0"):
        await client.chat.completions.create(model="agent", messages=ASK, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="agent", messages=ASK, stream=True, n=0)


async def test_a_failure_of_the_engine_is_tried_once():
    def script(prompt, version):
        raise OSError("disk full")

    app, backend = make_app(script)
    with pytest.raises(openai.InternalServerError, match="OSError: disk full"):
        await async_client(app).chat.completions.create(model="agent", messages=ASK)
    assert len(backend.requests) == 1


async def test_a_timeout_stops_the_sampling():
    app, backend = make_app(delay=60)
    with pytest.raises(openai.APITimeoutError):
        await async_client(app).chat.completions.create(model="agent", messages=ASK, timeout=0.05)
    assert (backend.active, backend.cancelled) == (0, 1)


async def test_cancelling_the_caller_stops_the_sampling():
    app, backend = make_app(delay=60)
    call = async_client(app).chat.completions.create(model="agent", messages=ASK)
    task = asyncio.create_task(call)
    while not backend.active:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (backend.active, backend.cancelled) == (0, 1)


async def test_concurrent_rollouts_record_their_own_calls():
    app, _ = make_app(lambda prompt, version: prompt.split("user\n")[1][:2], delay=0.001)
    client = async_client(app)

    async def rollout(name):
        with recording() as recorder:
            await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="agent", messages=[{"role": "user", "content": name}]
                    )
                    for _ in range(2)
                )
            )
        return recorder

    recorders = await asyncio.gather(*(rollout(f"{n:02}") for n in range(20)))
    for number, recorder in enumerate(recorders):
        assert [call.turn.message["content"] for call in recorder.calls] == [f"{number:02}"] * 2


def test_the_sync_client_works_where_no_loop_runs():
    app, _ = make_app()
    with sync_client(app, lambda: None) as client:
        assert client.chat.completions.create(model="agent", messages=ASK).choices[0].message.content == "hi"
        stream = client.chat.completions.create(model="agent", messages=ASK, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hi"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=ASK)
    assert "artnb-sync-client" not in {t.name for t in wait_for_threads("artnb-sync-client")}


def wait_for_threads(name):
    deadline = time.monotonic() + 5
    while any(t.name == name for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.enumerate()


async def test_the_sync_client_refuses_to_block_the_loop_it_is_called_on():
    app, backend = make_app()
    client = sync_client(app, asyncio.get_running_loop)
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        client.chat.completions.create(model="agent", messages=ASK)
    assert not backend.requests


async def test_the_sync_client_in_a_thread_uses_the_model_s_loop_and_is_recorded():
    app, backend = make_app()
    loop, sample, threads = asyncio.get_running_loop(), backend.sample, []

    async def watched(request, *, policy="current"):
        threads.append(threading.current_thread())
        return await sample(request, policy=policy)

    backend.sample = watched
    client = sync_client(app, lambda: loop)
    with recording() as recorder:
        completion = await asyncio.to_thread(client.chat.completions.create, model="agent", messages=ASK)
    assert threads == [threading.main_thread()]
    assert [call.turn for call in recorder.calls] == [Turn.from_choice(completion.choices[0])]


async def test_a_timeout_of_the_sync_client_stops_the_sampling():
    app, backend = make_app(delay=60)
    loop = asyncio.get_running_loop()
    client = sync_client(app, lambda: loop)
    with pytest.raises(openai.APITimeoutError):
        await asyncio.to_thread(client.chat.completions.create, model="agent", messages=ASK, timeout=0.05)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (backend.active, backend.cancelled) == (0, 1)


@pytest.fixture
def served():
    app, backend = make_app(("hi there",))
    with serve(app) as server:
        yield server, backend


def test_serve_answers_openai_over_loopback(served):
    server, _ = served
    assert server.url.startswith("http://127.0.0.1:")
    client = openai.OpenAI(base_url=server.url, api_key=server.api_key, max_retries=0)
    completion = client.chat.completions.create(model="agent", messages=ASK)
    assert Turn.from_choice(completion.choices[0]).message["content"] == "hi there"
    stream = client.chat.completions.create(model="agent", messages=ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hi there"
    assert [m.id for m in client.models.list()] == ["agent", "agent@base"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ASK)
    client.close()


def test_serve_wants_its_token_and_does_not_show_it(served):
    server, backend = served
    assert server.api_key not in repr(server)
    client = openai.OpenAI(base_url=server.url, api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="agent", messages=ASK)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert client.get("/../health", cast_to=dict[str, str]) == {"status": "ok"}
    assert not backend.requests
    client.close()


def test_serve_cancels_the_sampling_when_the_caller_hangs_up():
    app, backend = make_app(delay=60)
    with serve(app) as server:
        client = openai.OpenAI(base_url=server.url, api_key=server.api_key, max_retries=0, timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="agent", messages=ASK)
        client.close()
        deadline = time.monotonic() + 5
        while backend.active and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (backend.active, backend.cancelled) == (0, 1)


def test_serve_streams_as_it_is_sampled_and_stops_when_the_caller_hangs_up():
    app, backend = make_app(("abc " * 20,), delay=1.0)
    with serve(app) as server:
        client = openai.OpenAI(base_url=server.url, api_key=server.api_key, max_retries=0)
        seen = []
        for chunk in client.chat.completions.create(model="agent", messages=ASK, stream=True):
            seen.append((backend.active, chunk.choices[0].delta.content or ""))
        assert "".join(text for _, text in seen) == "abc " * 20
        assert len([text for active, text in seen if active and text]) > 3
        with client.chat.completions.create(model="agent", messages=ASK, stream=True) as stream:
            next(iter(stream))
        client.close()
        deadline = time.monotonic() + 5
        while backend.active and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (backend.active, backend.cancelled) == (0, 1)


def test_serve_closes_twice_and_frees_its_port():
    app, _ = make_app()
    server = serve(app)
    port = int(server.url.split(":")[2].split("/")[0])
    server.close()
    server.close()
    assert not any(t.name == "artnb-serve" for t in threading.enumerate())
    with serve(app, port) as again:
        assert again.url == server.url
        with pytest.raises(ArtnbError, match=f"port {port} is taken"):
            serve(app, port)
