"""How large is the model that a configuration describes? Counted from the numbers in its config alone.

Families whose layers are known are counted by formula; any other that transformers knows is built on
torch's ``meta`` device, which holds shapes and no weights. Nothing is downloaded but a config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artnb.config import LoraConfig
from artnb.errors import ConfigurationError, require

_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers reads with code from the hub, and a built-in one of the same layers."""


@dataclass(frozen=True)
class Linear:
    """One linear layer, as often as the model has it."""

    name: str
    """Last part of its module name, for example ``q_proj``."""
    inputs: int
    outputs: int
    bias: bool
    count: int

    @property
    def weights(self) -> int:
        return self.count * self.inputs * self.outputs

    @property
    def biases(self) -> int:
        return self.count * self.outputs * self.bias


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder, in numbers of parameters and elements. The output layer is not in ``linears``."""

    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding itself."""
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    linears: tuple[Linear, ...]
    experts: int
    """Parameters of routed experts, all of them; they are no linear layers: one tensor holds many."""
    active_experts: int
    """Those of them that one token uses."""
    other: int
    """Norms, routers, and whatever else is neither linear, expert nor embedding."""
    mlp_width: int
    """Width of the feed-forward that one token passes in the widest layer."""
    normed_heads: bool
    """Queries and keys are normed (Qwen3, Gemma 3)."""
    latent: int
    """Elements that multi-head latent attention caches per token and layer; 0 for ordinary attention."""
    windows: tuple[int, ...]
    """For each layer the number of tokens that it attends to, 0 for all."""

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters that the output layer has of its own."""
        return 0 if self.tied else self.embedding

    @property
    def linear_weights(self) -> int:
        return sum(linear.weights for linear in self.linears)

    @property
    def parameters(self) -> int:
        """All of them, a tied embedding counted once."""
        biases = sum(linear.biases for linear in self.linears)
        return self.linear_weights + biases + self.experts + self.other + self.embedding + self.head

    @property
    def active_parameters(self) -> int:
        """Those that take part in the computation of one token."""
        return self.parameters - self.experts + self.active_experts

    @property
    def kv_elements(self) -> int:
        """Elements that one token adds to the cache of one layer."""
        return self.latent or 2 * self.kv_heads * self.head_dim

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence's keys and values: 2 * layers * kv_heads * head_dim * itemsize a token."""
        kept = sum(min(tokens, window) if window else tokens for window in self.windows)
        return kept * self.kv_elements * itemsize

    def targets(self, lora: LoraConfig) -> list[Linear]:
        """Linear layers that get an adapter. Raises ConfigurationError for names that none has."""
        if lora.targets == "all-linear":
            return list(self.linears)
        wanted = {lora.targets} if isinstance(lora.targets, str) else set(lora.targets)
        unknown = sorted(wanted - {linear.name for linear in self.linears})
        if unknown:
            known = ", ".join(dict.fromkeys(linear.name for linear in self.linears))
            raise ConfigurationError(f"LoRA targets: {', '.join(unknown)} is no linear layer; known: {known}")
        return [linear for linear in self.linears if linear.name in wanted]

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """rank * (inputs + outputs) for each target."""
        return sum(lora.rank * (x.inputs + x.outputs) * x.count for x in self.targets(lora))


def read_config(base: Any) -> Any:
    """The text part of a model's configuration, with transformers' defaults filled in.

    base: a folder, a Hugging Face id, a mapping like config.json, or a ``PreTrainedConfig``. Raises
    ConfigurationError when it cannot be had.
    """
    transformers = require("transformers", extra="cpu", why="to read a model's configuration")
    if isinstance(base, str | Path):
        base = _config_json(str(base), transformers)
    if isinstance(base, Mapping):
        fields = {key: value for key, value in base.items() if key != "auto_map"}
        model_type = str(fields.pop("model_type", ""))
        try:
            base = transformers.AutoConfig.for_model(_SAME_AS.get(model_type, model_type), **fields)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"model_type {model_type!r} cannot be planned: {error}") from error
    return base.get_text_config()


def _config_json(name: str, transformers: Any) -> dict[str, Any]:
    try:
        fields, _ = transformers.PreTrainedConfig.get_config_dict(name)
    except OSError as error:  # the hub's errors are OSErrors too
        raise ConfigurationError(
            f"the configuration of {name} cannot be read: it is no local folder with a config.json, and "
            "the Hugging Face hub does not give it (no network, no such model, or no access to it). Pass "
            "a local folder, or the contents of its config.json as a dict"
        ) from error
    if not fields:
        raise ConfigurationError(f"{name} holds no config.json")
    return fields


def architecture(config: Any) -> Architecture:
    """Sizes of the model that a configuration from ``read_config`` describes."""
    count = _FAMILIES.get(config.model_type)
    return count(config) if count else built(config)


def _common(config: Any) -> dict[str, Any]:
    """What every family writes alike."""
    heads = config.num_attention_heads
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral") and window:
        kinds = ["sliding_attention"] * layers  # these have one window for all layers and no list
    return {
        "model_type": config.model_type,
        "layers": layers,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "tied": bool(config.tie_word_embeddings),
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "max_context": config.max_position_embeddings,
        "windows": tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds),
        "experts": 0,
        "active_experts": 0,
        "latent": 0,
    }


def _attention(config: Any, common: Mapping[str, Any], *, bias: bool, out_bias: bool) -> Iterator[Linear]:
    hidden, layers, head_dim = common["hidden"], common["layers"], common["head_dim"]
    queries, keys = common["heads"] * head_dim, common["kv_heads"] * head_dim
    yield Linear("q_proj", hidden, queries, bias, layers)
    yield Linear("k_proj", hidden, keys, bias, layers)
    yield Linear("v_proj", hidden, keys, bias, layers)
    yield Linear("o_proj", queries, hidden, out_bias, layers)


def _mlp(hidden: int, width: int, layers: int, *, bias: bool = False) -> Iterator[Linear]:
    if layers and width:
        yield Linear("gate_proj", hidden, width, bias, layers)
        yield Linear("up_proj", hidden, width, bias, layers)
        yield Linear("down_proj", width, hidden, bias, layers)


def _dense(config: Any) -> Architecture:
    """Llama, Mistral, Qwen2, Qwen3 and Gemma: they differ in biases and norms."""
    common, kind = _common(config), config.model_type
    hidden, layers = common["hidden"], common["layers"]
    bias = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
    normed = kind in ("qwen3", "gemma3_text")
    norms = 4 if kind in ("gemma2", "gemma3_text") else 2
    linears = [
        *_attention(config, common, bias=bias, out_bias=bias and kind != "qwen2"),
        *_mlp(hidden, config.intermediate_size, layers, bias=bool(getattr(config, "mlp_bias", False))),
    ]
    other = layers * (norms * hidden + 2 * common["head_dim"] * normed) + hidden
    return Architecture(
        **common,
        linears=tuple(linears),
        other=other,
        mlp_width=config.intermediate_size,
        normed_heads=normed,
    )


def _mixtral(config: Any) -> Architecture:
    common = _common(config)
    hidden, layers = common["hidden"], common["layers"]
    return Architecture(
        **{**common, **_routed(config, layers, config.intermediate_size, config.num_local_experts)},
        linears=tuple(_attention(config, common, bias=False, out_bias=False)),
        other=layers * (2 * hidden + config.num_local_experts * hidden) + hidden,
        mlp_width=config.num_experts_per_tok * config.intermediate_size,
        normed_heads=False,
    )


def _qwen3_moe(config: Any) -> Architecture:
    common = _common(config)
    hidden, layers, experts = common["hidden"], common["layers"], config.num_experts
    dense_only = set(config.mlp_only_layers or [])
    step = config.decoder_sparse_step
    sparse = sum(i not in dense_only and experts > 0 and (i + 1) % step == 0 for i in range(layers))
    bias, width = bool(config.attention_bias), config.moe_intermediate_size
    routed = config.num_experts_per_tok * width if sparse else 0
    dense = config.intermediate_size if sparse < layers else 0
    return Architecture(
        **{**common, **_routed(config, sparse, width, experts)},
        linears=(
            *_attention(config, common, bias=bias, out_bias=bias),
            *_mlp(hidden, config.intermediate_size, layers - sparse),
        ),
        other=layers * (2 * hidden + 2 * common["head_dim"]) + sparse * experts * hidden + hidden,
        mlp_width=max(routed, dense),
        normed_heads=True,
    )


def _deepseek(config: Any) -> Architecture:
    """DeepSeek-V3 and Kimi-K2: latent attention, dense first layers, then experts beside a shared one."""
    common = _common(config)
    hidden, layers, heads = common["hidden"], common["layers"], common["heads"]
    dense = min(config.first_k_dense_replace, layers)
    sparse, experts, width = layers - dense, config.n_routed_experts, config.moe_intermediate_size
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    rank, latent, bias = config.q_lora_rank, config.kv_lora_rank, bool(config.attention_bias)
    queries = [Linear("q_proj", hidden, heads * head, False, layers)]
    if rank:
        queries = [
            Linear("q_a_proj", hidden, rank, bias, layers),
            Linear("q_b_proj", rank, heads * head, False, layers),
        ]
    linears = [
        *queries,
        Linear("kv_a_proj_with_mqa", hidden, latent + config.qk_rope_head_dim, bias, layers),
        Linear("kv_b_proj", latent, heads * (config.qk_nope_head_dim + config.v_head_dim), False, layers),
        Linear("o_proj", heads * config.v_head_dim, hidden, bias, layers),
        *_mlp(hidden, config.intermediate_size, dense),
        *_mlp(hidden, width * config.n_shared_experts, sparse),
    ]
    active = (config.num_experts_per_tok + config.n_shared_experts) * width
    return Architecture(
        **{
            **common,
            **_routed(config, sparse, width, experts),
            "kv_heads": heads,
            "head_dim": head,
            "latent": latent + config.qk_rope_head_dim,
        },
        linears=tuple(linears),
        other=layers * (2 * hidden + (rank or 0) + latent) + sparse * experts * hidden + hidden,
        mlp_width=max(active if sparse else 0, config.intermediate_size if dense else 0),
        normed_heads=False,
    )


def _routed(config: Any, layers: int, width: int, experts: int) -> dict[str, int]:
    one = 3 * config.hidden_size * width
    return {
        "experts": layers * experts * one,
        "active_experts": layers * min(experts, config.num_experts_per_tok) * one,
    }


_FAMILIES: dict[str, Callable[[Any], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _dense),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek,
}


def built(config: Any) -> Architecture:
    """Sizes counted on the model itself, built without memory. Works for every model of transformers."""
    torch = require("torch", extra="cpu", why="to count the parameters of this model")
    transformers = require("transformers", extra="cpu", why="to count the parameters of this model")
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigurationError(f"transformers has no causal model of {config.model_type}") from error
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    kinds: dict[tuple[str, int, int, bool], int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            shape = module.in_features, module.out_features, module.bias is not None
            kind = (name.rpartition(".")[2], *shape)
            kinds[kind] = kinds.get(kind, 0) + 1
    linears = tuple(Linear(*kind, count) for kind, count in kinds.items())
    common = _common(config)
    sizes = [getattr(config, n, None) for n in ("num_experts", "num_local_experts", "n_routed_experts")]
    choices = next((size for size in sizes if size), 0)
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3 and choices and len(p) == choices)
    used = min(1.0, getattr(config, "num_experts_per_tok", 0) / choices) if choices else 0.0
    held = embedding.weight.numel() + (0 if head.weight is embedding.weight else head.weight.numel())
    total = sum(p.numel() for p in model.parameters())
    counted = sum(x.weights + x.biases for x in linears)
    inner = max([x.outputs for x in linears if x.inputs == common["hidden"]], default=0)
    return Architecture(
        **{
            **common,
            "tied": head.weight is embedding.weight,
            "experts": stacked,
            "active_experts": round(stacked * used),
        },
        linears=linears,
        other=total - counted - stacked - held,
        mlp_width=inner,
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )
