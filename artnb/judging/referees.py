"""Who judges? A name becomes an endpoint with a key; nobody named means the model in this kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from artnb.errors import ConfigurationError
from artnb.judging.referee import Referee
from artnb.secrets import how_to_set, keep_secret, secret

_KEY = "OPENAI_API_KEY"
_LOCAL = ("http://localhost", "http://127.0.0.1", "http://[::1]")


def referees(
    judge: str | Referee | Sequence[str | Referee] | None,
    model: Any,
    *,
    base_url: str | None,
    api_key: str | None,
    price: tuple[float, float] | None,
    options: Mapping[str, Any],
    context: int | None,
    max_tokens: int,
    timeout: float,
) -> list[Referee]:
    """The judges that these arguments of ``judge`` name. Raises ConfigurationError."""
    if judge is None:
        return [
            kernel_referee(model, max_tokens=max_tokens, context=context, timeout=timeout, options=options)
        ]
    named = [judge] if isinstance(judge, str | Referee) else list(judge)
    if not named or not all(isinstance(one, str | Referee) for one in named):
        raise ConfigurationError(f"judge must be a model's name, a Referee, or a list of them; got {judge!r}")
    made = []
    for one in named:
        if isinstance(one, Referee):
            made.append(one)
            continue
        settings: dict[str, Any] = {"price": price, "options": options, "timeout": timeout}
        made.append(
            endpoint(
                one,
                base_url=base_url,
                api_key=api_key,
                max_tokens=max_tokens,
                is_ours=True,
                **({"context": context} if context else {}),
                **settings,
            )
        )
    return made


def endpoint(
    model: str, *, base_url: str | None = None, api_key: str | None = None, **settings: Any
) -> Referee:
    """A judge behind an OpenAI-compatible endpoint. ``settings`` are fields of Referee.

    Raises ConfigurationError when there is no key; servers on this machine need none.
    """
    import openai

    is_local = base_url is not None and base_url.startswith(_LOCAL)
    key = api_key or secret(_KEY) or ("none" if is_local else None)
    if key is None:
        raise ConfigurationError(
            f"judge {model!r} needs a key: {how_to_set(_KEY)}, or pass api_key=. "
            "judge=None lets the model in this kernel judge, without a key"
        )
    keep_secret("api_key", key)
    client = openai.AsyncOpenAI(api_key=key, base_url=base_url, max_retries=0, timeout=None)
    identity = {"endpoint": str(client.base_url), "model": model}
    return Referee(name=model, model=model, client=client, identity=identity, **settings)


def kernel_referee(
    model: Any,
    *,
    max_tokens: int = 2048,
    context: int | None = None,
    timeout: float = 120.0,
    options: Mapping[str, Any] | None = None,
) -> Referee:
    """The model in this kernel with its adapter off: the same judge at every step."""
    if model is None:
        raise ConfigurationError(
            "judge=None lets the model in this kernel judge: pass model=, or name a judge"
        )
    room = min(context or model.backend.max_context, model.backend.max_context)
    encode = getattr(getattr(model.backend, "tokenizer", None), "encode", None)
    identity = hashlib.sha256(repr(model.backend.describe().get("identity")).encode()).hexdigest()
    return Referee(
        name=f"{model.name} (base, in this kernel)",
        model=f"{model.name}@base",
        client=model.client,
        context=room,
        max_tokens=min(max_tokens, max(64, room // 4)),
        timeout=timeout,
        tries=1,
        price=(0.0, 0.0),
        options={"temperature": 0.0, **(options or {})},
        identity={"kernel": identity},
        count_tokens=(lambda text: len(encode(text))) if encode else None,
    )
