"""How does a policy learn from replies that it is shown? The same exact tokens, all with advantage 1.

Messages become the tokens that the engine would have to sample to say the same: each assistant turn is
what the conversation's rendering adds to the turn's prompt, up to the token that ends it. The model's
own trajectories keep the tokens they have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from artnb.batch import Span, supervised_samples
from artnb.chat_request import ChatError, read_request
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError, RequestError
from artnb.rendering import Renderer
from artnb.step_metrics import describe_examples
from artnb.train import StepResult, take_step
from artnb.types import Message, Trajectory

Example = Sequence[Message] | Mapping[str, Any] | Trajectory
"""Messages; a dict of ``messages`` and perhaps ``tools``; or a trajectory."""

NOT_HERE = {"loss", "advantage", "credit_weight", "max_staleness"} | {
    *("ratio_cap", "clip_low", "clip_high", "dppo_threshold", "mask", "mask_low", "mask_high")
}
"""Options that compare attempts or policies; a given ``config`` may hold them."""


async def sft_step(
    model: Any, examples: Sequence[Example], config: TrainConfig | None = None, **options: Any
) -> StepResult:
    """Train one supervised step on examples, publish it, and save a checkpoint.

    An example is a list of OpenAI messages, a dict ``{"messages": [...], "tools": [...]}`` (other keys
    are ignored), or a Trajectory, such as the best of earlier groups. Every assistant turn is learned:
    its text, calls and thinking as the chat template writes them, and its end. Where the template drops
    earlier thinking, the example becomes several rows. Of a trajectory exactly the sampled tokens of its
    turns are learned, whatever policy of this tokenizer sampled them, and its plain messages are not.

    The loss is the mean negative log-likelihood of a token at temperature 1, in nats; ``aggregate`` may
    weigh examples alike instead, and ``kl_coef`` and ``entropy_coef`` add their terms. The metrics'
    ``nll`` is the plain mean. It is a step of the run like ``train_step``'s, as a whole or not at all;
    its line of metrics has ``kind`` ``sft``. ``options`` change single fields of ``config``. One call is
    one step: go through a data set in your own loop, and see ``schedule`` for the learning rate.

    Raises ConfigurationError for examples that cannot be learned from, Interrupted, PublicationError,
    CheckpointError.
    """
    started = time.perf_counter()
    if useless := sorted(set(options) & NOT_HERE):
        raise ConfigurationError(f"{', '.join(useless)}: a supervised step compares no attempts or policies")
    config = (config or TrainConfig()).replace(**options, loss="reinforce", mask="none")
    model.run.check_writable()
    spans = [_spans(model, example, f"example {i}") for i, example in enumerate(_listed(examples))]
    rows = supervised_samples(spans, config, step=model.run.step)
    return await take_step(model, rows, config, describe_examples(rows), started, kind="sft")


def _listed(examples: Sequence[Example]) -> Sequence[Example]:
    if isinstance(examples, (str, Mapping, Trajectory)) or not isinstance(examples, Sequence):
        raise ConfigurationError(f"examples must be a list of examples, got {type(examples).__name__}")
    if not examples:
        raise ConfigurationError("there are no examples")
    if isinstance(examples[0], Mapping) and "role" in examples[0]:
        raise ConfigurationError("these examples are messages: put each conversation into a list of its own")
    return examples


def _spans(model: Any, example: Example, where: str) -> list[Span]:
    """Prompt and completion of every turn to learn. Raises ConfigurationError."""
    if isinstance(example, Trajectory):
        spans = _own_spans(example, where)
    else:
        spans = _rendered_spans(model, example, where)
    if not any(completion for _, completion in spans):
        raise ConfigurationError(f"{where} has no assistant turn to learn")
    longest, limit = max(len(prompt + completion) for prompt, completion in spans), model.backend.max_context
    if longest > limit:
        raise ConfigurationError(
            f"{where} has {longest} tokens, the model's context holds {limit}. Shorten it or leave it out."
        )
    return spans


def _own_spans(trajectory: Trajectory, where: str) -> list[Span]:
    try:
        return [(turn.prompt_ids, turn.completion_ids) for turn in trajectory.turns]
    except ValueError as error:  # a Choice that artnb's client did not make
        raise ConfigurationError(f"{where}: {error}") from error


def _rendered_spans(model: Any, example: Any, where: str) -> list[Span]:
    given = example if isinstance(example, Mapping) else {"messages": example}
    messages, tools = given.get("messages"), given.get("tools")
    if not isinstance(messages, (list, tuple)):
        raise ConfigurationError(
            f"{where} must be a list of messages, a dict with such a list under 'messages', or a Trajectory; "
            f"got {type(messages if isinstance(example, Mapping) else example).__name__}"
        )
    body = {"model": model.name, "messages": list(messages), "tools": tools}
    try:
        request = read_request(body, model.sampling)
    except ChatError as error:
        raise ConfigurationError(f"{where}, {error.param}: {error}") from error
    spans = []
    for place, message in enumerate(request.messages):
        if message["role"] == "assistant":
            try:
                spans.append(_rendered_span(model, request.messages[: place + 1], request.tools))
            except (RequestError, ConfigurationError) as error:
                raise ConfigurationError(f"{where}, messages[{place}]: {error}") from error
    return spans


def _rendered_span(model: Any, messages: Sequence[Message], tools: Any) -> Span:
    """What the engine reads before the last message, and what it would have to sample to say it."""
    renderer: Renderer = model.app.renderer
    prompt = renderer.render(messages[:-1], tools)
    written = renderer.render(messages, tools, add_generation_prompt=False)
    completion = written[len(prompt) :]
    if written[: len(prompt)] != prompt:
        completion = _beyond(model.tokenizer, prompt, written)
    end = next((k for k, token in enumerate(completion) if token in renderer.stop_ids), None)
    if end is None:  # the template ends a turn by the next one's beginning; an engine needs a token
        return prompt, (*completion, renderer.stop_ids[0])
    return prompt, completion[: end + 1]


def _beyond(tokenizer: Any, prompt: tuple[int, ...], written: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that say the rest of ``written`` where one of its tokens reaches into the prompt."""
    asked, said = _text(tokenizer, prompt), _text(tokenizer, written)
    rest = tuple(tokenizer.encode(said.removeprefix(asked), add_special_tokens=False))
    if not said.startswith(asked) or _text(tokenizer, prompt + rest) != said:
        raise ConfigurationError(
            "the chat template does not write this turn as it asks for it, so the model cannot say it: the "
            f"prompt ends with {asked[-40:]!r}. If that opens the model's thinking, give the message its "
            "reasoning_content."
        )
    return rest


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
