"""Gemma, Mistral, Kimi, DeepSeek and GLM through their templates, thinking switched off, and a stranger."""

import copy
import json
import warnings
from dataclasses import replace
from functools import cache

import pytest
from chat_tokenizers import FAMILIES, MORE_FAMILIES, TekkenTokenizer, make_tokenizer
from test_rendering import CALL_TEXT, QUESTION, TOOL, bridge, sample, spelled_markup

from artnb.chat_template import UnknownTemplateWarning
from artnb.errors import RequestError
from artnb.rendering import TemplateRenderer, make_renderer
from artnb.tool_calls import parse_deepseek, parse_glm, parse_kimi, parse_mistral

CALLS = {
    "gemma": CALL_TEXT["hermes"],
    "gemma3": CALL_TEXT["hermes"],
    "deepseekv3": CALL_TEXT["hermes"],
    "glm4moe": "\n<think></think>\n<tool_call>price\n<arg_key>item</arg_key>\n"
    "<arg_value>kite</arg_value>\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.price:0<|tool_call_argument_begin|>"
    '{"item": "kite"}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS][{"name": "price", "arguments": {"item": "kite"}, "id": "abcdefghi"}]',
    "phi3": CALL_TEXT["hermes"],
}
BROKEN = {
    "glm4moe": ["<tool_call>price\n<arg_key>item</arg_key>\n</tool_call>", "<tool_call>price"],
    "kimi": [
        CALLS["kimi"].replace('"}', '"'),
        CALLS["kimi"].replace("<|tool_call_argument_begin|>", " "),
        CALLS["kimi"].partition("<|tool_call_end|>")[0],
        "<|tool_calls_section_begin|>",
    ],
    "mistral": [
        CALLS["mistral"][:-1],
        '[TOOL_CALLS]{"name": "price"}',
        "[TOOL_CALLS][]",
        '[TOOL_CALLS]price[ARGS]{"item"',
        '[TOOL_CALLS][{"name": "price", "arguments": {}}, {"arguments": {}}]',
    ],
    "deepseekv3": [
        CALL_TEXT["hermes"][:-2],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>price\n```json\n{\n```<｜tool▁call▁end｜>",
    ],
    "gemma": [CALL_TEXT["hermes"][:-2]],
}
QUIET = ["deepseekv3", "glm4moe", "kimi", "mistral", "gemma3"]
"""Families about which there is nothing to warn of."""
PLAIN = [{"role": "user", "content": "A kite?"}]
DIALOGUE = [*PLAIN, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "world"}]


@cache
def tokenizer_of(family):
    return TekkenTokenizer() if family == "mistral" else make_tokenizer(family)


def renderer_of(family):
    tokenizer = tokenizer_of(family)
    return tokenizer, TemplateRenderer(tokenizer)


def asked(family):
    """Two turns of the real conversation with a call, as the OpenAI client sends it."""
    call_id = {"kimi": "functions.price:0"}.get(family, "abcdefghi")
    function = {"name": "price", "arguments": '{"item": "kite"}'}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "costs 17"},
    ]


def with_objects(messages):
    """The same messages as chat templates are given them: arguments as objects."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("family", CALLS)
def test_it_renders_what_the_template_writes(family):
    tokenizer, renderer = renderer_of(family)
    written = tokenizer.apply_chat_template(DIALOGUE, add_generation_prompt=True, tokenize=False)
    assert renderer.render(DIALOGUE) == tuple(tokenizer.encode(written, add_special_tokens=False))


@pytest.mark.parametrize("family", ["glm4moe", "kimi", "mistral"])
def test_calls_tools_and_results_go_through_the_template_itself(family):
    tokenizer, renderer = renderer_of(family)
    messages = with_objects(asked(family))
    written = tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
    )
    assert renderer.render(asked(family), [TOOL]) == tuple(
        tokenizer.encode(written, add_special_tokens=False)
    )
    assert "costs 17" in written and CALLS[family].strip() in written


def test_mistral_s_tokens_are_those_of_mistral_common():
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    tokenizer, renderer = renderer_of("mistral")
    more = [{"role": "assistant", "content": "hello 17"}, {"role": "user", "content": "world?"}]
    for messages in (DIALOGUE, asked("mistral"), [*asked("mistral"), *more]):
        for tools in (None, [TOOL]):
            request = ChatCompletionRequest.from_openai(messages, tools)
            expected = tokenizer.mistral.encode_chat_completion(request).tokens
            assert renderer.render(messages, tools) == tuple(expected)


def test_kimi_s_tokens_are_those_of_the_renderers_package():
    from renderers.base import create_renderer
    from renderers.configs import config_from_name

    tokenizer, renderer = renderer_of("kimi")
    theirs = create_renderer(tokenizer, config_from_name("kimi-k2"))
    for messages in (DIALOGUE, asked("kimi")):
        expected = theirs.render_ids(with_objects(messages), tools=[TOOL], add_generation_prompt=True)
        assert tokenizer.decode(renderer.render(messages, [TOOL])) == tokenizer.decode(expected)
        assert renderer.render(messages, [TOOL]) == tuple(expected)


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_conversation_extends_its_own_tokens_and_is_what_the_template_writes(family):
    tokenizer, renderer = renderer_of(family)
    before = "</think>" if family == "deepseekv3" else ""
    first = sample(
        tokenizer, renderer, renderer.render(QUESTION, [TOOL]), before + CALLS[family], tools=[TOOL]
    )
    if family == "glm4moe":  # it goes on to a result, not to a question
        first = replace(first, completion_ids=(*first.completion_ids[:-1], opener("<|observation|>")))
    (call,) = first.message["tool_calls"]
    assert call["function"] == {"name": "price", "arguments": '{"item": "kite"}'}
    assert first.message["content"] == ""

    result = {"role": "tool", "tool_call_id": call["id"], "content": "costs 17"}
    following = bridge(renderer, first, QUESTION, [result], [TOOL])
    afresh = renderer.render([*QUESTION, first.message, result], [TOOL])
    assert following[: len(first.ids)] == first.ids
    assert following != afresh  # the own turn keeps its spelling
    assert without_own_thinking(family, tokenizer.decode(following)) == tokenizer.decode(afresh)


def without_own_thinking(family, text):
    """DeepSeek's template opens thinking in the prompt and shows none of it later."""
    return text.replace("<think>\n</think>", "", 1) if family == "deepseekv3" else text


def test_deepseek_s_template_drops_thinking_so_a_new_row_begins():
    tokenizer, renderer = renderer_of("deepseekv3")
    text = "hm\n</think>\n\n" + CALLS["deepseekv3"]
    turn = sample(tokenizer, renderer, renderer.render(QUESTION, [TOOL]), text, tools=[TOOL])
    assert turn.message["reasoning_content"] == "hm" and len(turn.message["tool_calls"]) == 1
    result = {"role": "tool", "tool_call_id": "x", "content": "costs 17"}
    assert bridge(renderer, turn, QUESTION, [result], [TOOL]) is None
    assert "hm" not in tokenizer.decode(renderer.render([*QUESTION, turn.message, result], [TOOL]))


def opener(token):
    return make_tokenizer("glm4moe").convert_tokens_to_ids(token)


@pytest.mark.parametrize("family", CALLS)
def test_the_next_question_extends_the_answer_s_own_tokens(family):
    tokenizer, renderer = renderer_of(family)
    answer = {"glm4moe": "\n<think></think>\nhello", "deepseekv3": "</think>hello"}.get(family, "hello")
    turn = sample(tokenizer, renderer, renderer.render(PLAIN), answer)
    assert turn.message == {"role": "assistant", "content": "hello"}
    user = {"role": "user", "content": "again"}
    following = bridge(renderer, turn, PLAIN, [user])
    afresh = renderer.render([*PLAIN, turn.message, user])
    assert following[: len(turn.ids)] == turn.ids != afresh[: len(turn.ids)]
    assert without_own_thinking(family, tokenizer.decode(following)) == tokenizer.decode(afresh)
    cut = sample(tokenizer, renderer, renderer.render(PLAIN), answer, end=False)
    assert bridge(renderer, cut, PLAIN, [user]) == following


def test_mistral_s_template_moves_tools_and_system_message_so_a_new_row_begins():
    tokenizer, renderer = renderer_of("mistral")
    user = {"role": "user", "content": "again"}
    turn = sample(tokenizer, renderer, renderer.render(PLAIN, [TOOL]), "hello", tools=[TOOL])
    assert bridge(renderer, turn, PLAIN, [user], [TOOL]) is None
    turn = sample(tokenizer, renderer, renderer.render(QUESTION), "hello")
    assert bridge(renderer, turn, QUESTION, [user]) is None


def test_mistral_takes_call_ids_of_any_form():
    tokenizer, renderer = renderer_of("mistral")
    messages = json.loads(json.dumps(asked("mistral")).replace("abcdefghi", "call_0123456789abcdef"))
    text = tokenizer.decode(renderer.render(messages, [TOOL]))
    shortened = text.partition('"id": "')[2].partition('"')[0]
    assert len(shortened) == 9 and text.endswith(f'"call_id": "{shortened}"}}[/TOOL_RESULTS]')


def test_glm_opens_the_next_message_itself_and_only_the_right_one_is_extended():
    tokenizer, renderer = renderer_of("glm4moe")
    assert tokenizer.convert_ids_to_tokens(renderer.stop_ids) == [
        "<|user|>",
        "<|observation|>",
        "<|endoftext|>",
    ]
    turn = sample(tokenizer, renderer, renderer.render(PLAIN), "\nhello")  # and opens a user's message
    assert turn.completion_ids[-1] == opener("<|user|>")
    result = {"role": "tool", "tool_call_id": "x", "content": "17"}
    assert bridge(renderer, turn, PLAIN, [result]) is None


def test_a_template_that_joins_arguments_to_text_is_given_text():
    tokenizer = copy.deepcopy(make_tokenizer("deepseekv3"))
    tokenizer.chat_template = "{# tools are told #}" + tokenizer.chat_template
    renderer = TemplateRenderer(tokenizer)
    messages = asked("deepseekv3")
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert renderer.render(messages, [TOOL]) == tuple(tokenizer.encode(written, add_special_tokens=False))
    text = written[written.index("<｜tool▁calls▁begin｜>") :].partition("<｜end▁of▁sentence｜>")[0]
    ids = (*spelled_markup(tokenizer, "</think>" + text), renderer.stop_ids[0])
    assert renderer.parse(ids, [TOOL]).message["tool_calls"][0]["function"]["name"] == "price"


def test_gemma_gets_its_system_message_before_the_first_question():
    tokenizer, renderer = renderer_of("gemma")
    with pytest.raises(Exception, match="System role not supported"):
        tokenizer.apply_chat_template(QUESTION, tokenize=False)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "You sell.\n\nA kite?"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(renderer.render(QUESTION)) == expected
    gemma3 = TemplateRenderer(make_tokenizer("gemma3"))  # whose template does the same
    assert tokenizer.decode(gemma3.render(QUESTION)) == expected
    with pytest.raises(RequestError, match="alternate"):
        renderer.render([*PLAIN, *PLAIN])


@pytest.mark.parametrize(("family", "broken"), [(f, text) for f, texts in BROKEN.items() for text in texts])
def test_a_broken_call_stays_as_text_and_is_reported(family, broken):
    tokenizer, renderer = renderer_of(family)
    thought = "</think>" if family == "deepseekv3" else ""
    ids = (*spelled_markup(tokenizer, f"{thought}hello {broken}"), renderer.stop_ids[0])
    parsed = renderer.parse(ids, [TOOL])
    assert parsed.tool_call_error
    assert "tool_calls" not in parsed.message
    assert parsed.message["content"].split() == f"hello {broken}".split()
    assert renderer.parse(ids).tool_call_error is None  # nobody asked for calls


def functions(parsed):
    assert parsed.error is None and parsed.content == "So."
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.calls]


def test_several_calls_are_read_in_every_format():
    both = [("price", {"item": "17"}), ("stock", {"least": 3, "of": ["a"]})]
    deepseek = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
    old = [f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(value)}\n```" for name, value in both]
    new = [f"{name}<｜tool▁sep｜>{json.dumps(value)}" for name, value in both]
    for bodies in (old, new):
        blocks = "\n".join(map(deepseek.format, bodies))
        text = f"So.<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"
        assert functions(parse_deepseek(text)) == both
    kimi = "".join(
        f"<|tool_call_begin|>functions.{name}:{k}<|tool_call_argument_begin|>{json.dumps(value)}<|tool_call_end|>"
        for k, (name, value) in enumerate(both)
    )
    parsed = parse_kimi(f"So.<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>")
    assert functions(parsed) == both
    assert [c["id"] for c in parsed.calls] == ["functions.price:0", "functions.stock:1"]
    records = json.dumps([{"name": name, "arguments": value} for name, value in both])
    assert functions(parse_mistral(f"So.[TOOL_CALLS]{records}")) == both
    later = "".join(f"[TOOL_CALLS]{name}[CALL_ID]a[ARGS]{json.dumps(value)}" for name, value in both)
    assert functions(parse_mistral(f"So.{later}")) == both
    glm = (
        "So.\n<tool_call>price\n<arg_key>item</arg_key>\n<arg_value>17</arg_value>\n</tool_call>\n<tool_call>stock\n"
        "<arg_key>least</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>of</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>'
    )
    assert functions(parse_glm(glm, [TOOL])) == both  # 17 is a string, as the tool declares it


def test_qwen3_without_thinking_is_the_template_s_own_switch():
    tokenizer = make_tokenizer("qwen3")
    renderer = make_renderer(tokenizer, "Qwen/Qwen3-0.6B", template_kwargs={"enable_thinking": False})
    written = tokenizer.apply_chat_template(
        DIALOGUE, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert written.endswith("<think>\n\n</think>\n\n")
    assert renderer.render(DIALOGUE) == tuple(tokenizer.encode(written, add_special_tokens=False))
    turn = sample(tokenizer, renderer, renderer.render(PLAIN), "hello")
    assert turn.message == {"role": "assistant", "content": "hello"}
    user = {"role": "user", "content": "again"}
    following = bridge(renderer, turn, PLAIN, [user])
    assert following[: len(turn.ids)] == turn.ids
    afresh = tokenizer.decode(renderer.render([*PLAIN, turn.message, user]))
    # The only difference: the template leaves the first empty thinking out of the past.
    assert tokenizer.decode(following).replace("<think>\n\n</think>\n\n", "", 1) == afresh


@pytest.mark.parametrize("family", [*FAMILIES, *QUIET])
def test_a_tested_family_says_nothing(family):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_renderer(tokenizer_of(family)).not_guaranteed == ()


def test_an_unknown_template_says_once_what_is_not_guaranteed():
    with pytest.warns(UnknownTemplateWarning) as caught:
        renderer = make_renderer(make_tokenizer("phi3"), "somebody/else")
        renderer.render(QUESTION, [TOOL])
    (warning,) = caught
    text = str(warning.message)
    assert "the chat template of somebody/else is not fully covered" in text
    assert "may differ" in text and "thinking" in text and "no parser here reads its tool calls" in text
    assert all(limit in text for limit in renderer.not_guaranteed)
    assert len(renderer.not_guaranteed) == 2


def test_a_known_family_with_a_call_format_of_its_own_says_so():
    tokenizer = copy.deepcopy(make_tokenizer("qwen2_5"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "<invoke>")
    with pytest.warns(UnknownTemplateWarning, match="no parser here reads its tool calls"):
        assert len(make_renderer(tokenizer).not_guaranteed) == 1


def test_gemma_without_system_role_says_so():
    with pytest.warns(UnknownTemplateWarning, match="no system role"):
        make_renderer(make_tokenizer("gemma"))


def test_a_tokenizer_with_several_templates_is_read_by_the_one_for_tools():
    tokenizer = copy.deepcopy(make_tokenizer("qwen2_5"))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": tokenizer.chat_template}
    one, several = TemplateRenderer(make_tokenizer("qwen2_5")), TemplateRenderer(tokenizer)
    assert several.render(QUESTION, [TOOL]) == one.render(QUESTION, [TOOL])


def test_every_new_family_is_covered():
    assert set(CALLS) == {*MORE_FAMILIES, "mistral"}
