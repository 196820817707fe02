"""Messages to tokens and back, on the original chat templates of four families."""

import json

import pytest
from chat_tokenizers import FAMILIES, make_tokenizer, spelled

from artnb.batch import to_samples
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError, RequestError
from artnb.prompt_memory import PromptMemory, canonical, conversation_keys, next_key
from artnb.rendering import TemplateRenderer, TypedRenderer, make_renderer
from artnb.tool_calls import parse_hermes, parse_llama
from artnb.types import Trajectory, TrajectoryGroup, Turn

TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
QUESTION = [{"role": "system", "content": "You sell."}, {"role": "user", "content": "A kite?"}]
CALL_TEXT = {
    "hermes": '<tool_call>\n{"name": "price", "arguments": {"item": "kite"}}\n</tool_call>',
    "llama": '{"name": "price", "parameters": {"item": "kite"}}',
}
TOOL_FAMILIES = {
    "smollm2": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3": "hermes",
    "llama3_1": "llama",
    "llama3_2": "llama",
}
TYPED = {"qwen3": "Qwen/Qwen3-0.6B", "llama3_2": "meta-llama/Llama-3.2-1B-Instruct"}
RENDERERS = [(family, "template") for family in FAMILIES] + [(family, "typed") for family in TYPED]


def renderer_of(family, kind="template"):
    tokenizer = make_tokenizer(family)
    renderer = make_renderer(tokenizer, TYPED[family] if kind == "typed" else "a-local-folder")
    assert isinstance(renderer, TypedRenderer if kind == "typed" else TemplateRenderer)
    return tokenizer, renderer


def sample(tokenizer, renderer, prompt_ids, text, *, tools=None, end=True):
    """A turn as an engine would sample it, spelled byte by byte as ``encode`` never would."""
    ids = spelled_markup(tokenizer, text) + (renderer.stop_ids[:1] if end else ())
    message = renderer.parse(ids, tools, prompt_ids=prompt_ids).message
    return Turn(prompt_ids, ids, (-0.5,) * len(ids), 0, "stop" if end else "length", message)


def spelled_markup(tokenizer, text):
    ids = []
    while text:
        found = next((t for t in tokenizer.get_added_vocab() if text.startswith(t)), None)
        piece = found or text[0]
        ids += [tokenizer.convert_tokens_to_ids(found)] if found else spelled(tokenizer, piece)
        text = text[len(piece) :]
    return tuple(ids)


def bridge(renderer, turn, messages, new, tools=None):
    return renderer.bridge(turn.prompt_ids, turn.completion_ids, [*messages, turn.message], new, tools)


@pytest.mark.parametrize(("family", "kind"), RENDERERS)
def test_it_renders_what_the_chat_template_writes(family, kind):
    tokenizer, renderer = renderer_of(family, kind)
    messages = [*QUESTION, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "world"}]
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text = tokenizer.decode(renderer.render(messages))
    assert text.split("You sell.")[1] == written.split("You sell.")[1]
    if "Today Date" not in written:  # a typed renderer pins the date
        assert renderer.render(messages) == tuple(tokenizer.encode(written, add_special_tokens=False))


@pytest.mark.parametrize(("family", "kind"), RENDERERS)
def test_a_tool_conversation_extends_its_own_tokens_and_shows_each_call_once(family, kind):
    tokenizer, renderer = renderer_of(family, kind)
    call = CALL_TEXT[TOOL_FAMILIES[family]]
    first = sample(tokenizer, renderer, renderer.render(QUESTION, [TOOL]), call, tools=[TOOL])
    assert first.message["tool_calls"][0]["function"] == {"name": "price", "arguments": '{"item": "kite"}'}

    result = {"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "costs 17"}
    prompt = bridge(renderer, first, QUESTION, [result], [TOOL])
    second = sample(tokenizer, renderer, prompt, "hello 17", tools=[TOOL])
    messages = [*QUESTION, first.message, result]
    more = {"role": "user", "content": "world?"}
    final = bridge(renderer, second, messages, [more], [TOOL])

    assert prompt[: len(first.ids)] == first.ids
    assert final[: len(second.ids)] == second.ids
    text = tokenizer.decode(final)
    conversation = text[text.index("A kite?") :]
    assert conversation.count('"name": "price"') == 1
    assert conversation.count("costs 17") == 1
    assert conversation.count("hello 17") == 1
    # Apart from the spelling of the model's own turns, it is what the template itself writes.
    afresh = renderer.render([*messages, second.message, more], [TOOL])
    assert conversation == tokenizer.decode(afresh).partition("You sell.")[2][-len(conversation) :]
    assert final != afresh


@pytest.mark.parametrize(("family", "kind"), RENDERERS)
def test_rows_train_on_sampled_tokens_alone_the_end_of_turn_included(family, kind):
    tokenizer, renderer = renderer_of(family, kind)
    first = sample(tokenizer, renderer, renderer.render(QUESTION), "hello")
    user = {"role": "user", "content": "again"}
    second = sample(tokenizer, renderer, bridge(renderer, first, QUESTION, [user]), "world")
    items = [*QUESTION, first, user, second]
    group = TrajectoryGroup([Trajectory(items, reward=1.0), Trajectory(items, reward=0.0)])
    row = to_samples([group], TrainConfig()).samples[0]
    trained = [i for i, sampled in zip(row.ids_T, row.is_sampled_T, strict=True) if sampled]
    end = renderer.stop_ids[0]
    assert trained == [*spelled(tokenizer, "hello"), end, *spelled(tokenizer, "world"), end]
    assert row.ids_T == second.ids
    between = row.ids_T[len(first.ids) : len(second.prompt_ids)]
    assert "again" in tokenizer.decode(between) and not any(
        row.is_sampled_T[len(first.ids) :][: len(between)]
    )


@pytest.mark.parametrize(("family", "kind"), RENDERERS)
def test_a_turn_cut_by_length_gets_its_end_as_context(family, kind):
    tokenizer, renderer = renderer_of(family, kind)
    prompt = renderer.render(QUESTION)
    whole = sample(tokenizer, renderer, prompt, "hello")
    cut = sample(tokenizer, renderer, prompt, "hello", end=False)
    user = {"role": "user", "content": "again"}
    bridged = bridge(renderer, cut, QUESTION, [user])
    assert bridged == bridge(renderer, whole, QUESTION, [user])
    assert bridged[len(cut.ids)] == renderer.stop_ids[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hand_written_assistant_message_is_context_of_the_bridge(family):
    tokenizer, renderer = renderer_of(family)
    turn = sample(tokenizer, renderer, renderer.render(QUESTION), "hello")
    new = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "by hand"},
        {"role": "user", "content": "two"},
    ]
    bridged = bridge(renderer, turn, QUESTION, new)
    assert bridged[: len(turn.ids)] == turn.ids
    assert "by hand" in tokenizer.decode(bridged[len(turn.ids) :])


@pytest.mark.parametrize("kind", ["template", "typed"])
def test_qwen3_keeps_thinking_inside_a_tool_cycle(kind):
    tokenizer, renderer = renderer_of("qwen3", kind)
    text = "<think>\nlook it up\n</think>\n\n" + CALL_TEXT["hermes"]
    turn = sample(tokenizer, renderer, renderer.render(QUESTION, [TOOL]), text, tools=[TOOL])
    assert turn.message["reasoning_content"].strip() == "look it up"
    assert turn.message["content"] == ""
    result = {"role": "tool", "tool_call_id": "x", "content": "17"}
    bridged = bridge(renderer, turn, QUESTION, [result], [TOOL])
    assert bridged[: len(turn.ids)] == turn.ids
    assert tokenizer.decode(bridged).count("look it up") == 1


@pytest.mark.parametrize("kind", ["template", "typed"])
def test_qwen3_drops_thinking_before_a_new_question_so_a_new_row_begins(kind):
    tokenizer, renderer = renderer_of("qwen3", kind)
    turn = sample(tokenizer, renderer, renderer.render(QUESTION), "<think>\nhm\n</think>\n\nhello")
    user = {"role": "user", "content": "again"}
    assert bridge(renderer, turn, QUESTION, [user]) is None
    afresh = renderer.render([*QUESTION, turn.message, user])
    second = sample(tokenizer, renderer, afresh, "<think>\nso\n</think>\n\nworld")
    items = [*QUESTION, turn, user, second]
    group = TrajectoryGroup([Trajectory(items, reward=1.0), Trajectory(items, reward=0.0)])
    rows = [s for s in to_samples([group], TrainConfig()).samples if s.advantages_T[-1] > 0]
    assert sorted(row.ids_T for row in rows) == sorted([turn.ids, second.ids])
    assert "hm" not in tokenizer.decode(second.ids)


@pytest.mark.parametrize("kind", ["template", "typed"])
def test_qwen3_without_thinking_goes_on_in_one_row(kind):
    tokenizer, renderer = renderer_of("qwen3", kind)
    turn = sample(tokenizer, renderer, renderer.render(QUESTION), "hello")
    bridged = bridge(renderer, turn, QUESTION, [{"role": "user", "content": "again"}])
    assert bridged[: len(turn.ids)] == turn.ids


def test_unfinished_thinking_is_reasoning_and_no_answer():
    tokenizer, renderer = renderer_of("qwen3")
    message = renderer.parse(spelled_markup(tokenizer, "<think>\nstill")).message
    assert message == {"role": "assistant", "content": "", "reasoning_content": "still"}


def test_think_tags_are_plain_text_to_a_template_that_does_not_think():
    tokenizer, renderer = renderer_of("smollm2")
    text = "<think>a</think>b"
    assert renderer.parse(spelled(tokenizer, text)).message["content"] == text


def test_a_template_without_tools_gets_them_in_the_system_message():
    tokenizer, renderer = renderer_of("smollm2")
    text = tokenizer.decode(renderer.render(QUESTION, [TOOL]))
    assert text.startswith("<|im_start|>system\nYou sell.\n\nYou may call")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    alone = tokenizer.decode(renderer.render(QUESTION[1:], [TOOL]))
    assert alone.startswith("<|im_start|>system\nYou may call")


def test_two_tool_results_share_one_user_message_where_tools_are_text():
    tokenizer, renderer = renderer_of("smollm2")
    calls = [
        {"id": n, "type": "function", "function": {"name": "price", "arguments": json.dumps({"item": n})}}
        for n in "ab"
    ]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
    ]
    text = tokenizer.decode(renderer.render(messages, [TOOL]))
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "price", "arguments": {"item": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "price", "arguments": {"item": "b"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("family", "kind"), [r for r in RENDERERS if TOOL_FAMILIES[r[0]] == "hermes"])
@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "price", "arguments": {"item"}}\n</tool_call>',
        '<tool_call>\n{"name": "price"',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
    ],
)
def test_a_malformed_call_stays_as_text_and_is_reported(family, kind, broken):
    tokenizer, renderer = renderer_of(family, kind)
    ids = (*spelled_markup(tokenizer, "hello " + broken), renderer.stop_ids[0])
    parsed = renderer.parse(ids, [TOOL])
    assert parsed.tool_call_error
    assert "tool_calls" not in parsed.message
    assert parsed.message["content"].split() == f"hello {broken}".split()


def test_a_good_call_beside_a_broken_one_is_kept():
    good = CALL_TEXT["hermes"]
    parsed = parse_hermes(f"I ask. {good}\n<tool_call>no</tool_call>")
    assert [c["function"]["name"] for c in parsed.calls] == ["price"]
    assert parsed.error and parsed.content == "I ask. \n<tool_call>no</tool_call>"


@pytest.mark.parametrize("text", ['{"name": "price", "parameters": {"item"', '{"name": 3, "parameters": {}}'])
def test_a_broken_llama_call_stays_as_text(text):
    parsed = parse_llama(text)
    assert parsed.error and parsed.content == text and not parsed.calls


def test_calls_are_not_read_when_the_request_has_no_tools():
    tokenizer, renderer = renderer_of("qwen2_5")
    message = renderer.parse(spelled_markup(tokenizer, CALL_TEXT["hermes"])).message
    assert message == {"role": "assistant", "content": CALL_TEXT["hermes"]}


def test_the_message_ends_before_a_stop_string():
    tokenizer, renderer = renderer_of("smollm2")
    ids = spelled(tokenizer, "<call>kite</call>")
    assert renderer.parse(ids, stop=["</answer>", "</call>"]).message["content"] == "<call>kite"


def test_any_end_of_turn_that_the_model_samples_counts():
    tokenizer, renderer = renderer_of("qwen2_5")
    ends = tokenizer.convert_ids_to_tokens(renderer.stop_ids)
    assert ends == ["<|im_end|>", "<|endoftext|>"]
    prompt, other = renderer.render(QUESTION), renderer.stop_ids[1]
    turn = Turn(
        prompt,
        (*spelled(tokenizer, "hi"), other),
        (0.0,) * 3,
        0,
        "stop",
        {"role": "assistant", "content": "hi"},
    )
    tail = bridge(renderer, turn, QUESTION, [{"role": "user", "content": "x"}])[len(turn.ids) :]
    assert tokenizer.decode(tail) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_refusing_template_is_a_request_error_and_no_bridge():
    _, renderer = renderer_of("llama3_1")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    two = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    with pytest.raises(RequestError, match="single tool-calls"):
        renderer.render([*QUESTION, two])
    own = {"role": "assistant", "content": "hi"}
    assert renderer.bridge((1,), (2,), [*QUESTION, own], [two, QUESTION[1]]) is None


def test_a_tokenizer_without_template_is_refused():
    class Bare:
        chat_template = None

    with pytest.raises(ConfigurationError, match="no chat template"):
        make_renderer(Bare())


def test_a_changed_template_is_not_rendered_by_the_family_s_renderer():
    import copy

    tokenizer = copy.deepcopy(make_tokenizer("qwen3"))
    tokenizer.chat_template = make_tokenizer("smollm2").chat_template.replace("assistant\n", "assistant:\n")
    assert isinstance(make_renderer(tokenizer, "Qwen/Qwen3-0.6B"), TemplateRenderer)


def turn_of(text="hi", size=10):
    return Turn((1,) * size, (2,), (0.0,), 0, "stop", {"role": "assistant", "content": text})


def test_the_memory_finds_the_longest_conversation():
    memory = PromptMemory()
    answers = [turn_of("one"), turn_of("two")]
    messages = []
    for number, answer in enumerate(answers):
        messages.append({"role": "user", "content": str(number)})
        messages.append(answer.message)
        memory.remember(conversation_keys(messages, None)[-1], messages, answer)
    request = [*messages, {"role": "user", "content": "2"}]
    assert memory.find(conversation_keys(request, None)).turn is answers[1]
    edited = [*messages[:3], {"role": "assistant", "content": "other"}, request[-1]]
    assert memory.find(conversation_keys(edited, None)).turn is answers[0]
    assert memory.find(conversation_keys(request, [TOOL])) is None
    assert memory.find(conversation_keys(request, None, scope="another tokenizer")) is None


def test_the_memory_is_bounded_and_forgets_the_least_recently_used():
    memory = PromptMemory(max_tokens=33)
    keys = [next_key(b"", {"role": "user", "content": str(n)}) for n in range(4)]
    for key in keys[:3]:
        memory.remember(key, [], turn_of())
    assert memory.find(keys[:1]) is not None
    memory.remember(keys[3], [], turn_of())
    assert len(memory) == 3
    assert memory.find([keys[1]]) is None
    assert memory.find([keys[0]]) is not None


def test_messages_are_compared_by_what_they_say():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    same = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    one = {"role": "assistant", "content": None, "tool_calls": [call]}
    other = {"role": "assistant", "content": " ", "tool_calls": [same], "refusal": None}
    assert canonical(one) == canonical(other)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert canonical(parts) == canonical({"role": "user", "content": "ab"})
    assert canonical(parts) != canonical({"role": "user", "content": "ab "})
