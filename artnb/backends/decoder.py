"""How does a model's forward run when it only samples? With packed weights and few, fused kernels.

Small models spend more time between matrix products than in them. Decoders of Llama's shape run
here with one product for q, k and v, with the activation and both residual additions fused into
the products; any other model runs through transformers' own modules with packed linear layers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from artnb.backends.attention import AttentionPlan, TreePlan

log = logging.getLogger(__name__)
Weights = Mapping[str, torch.Tensor]


class Decoder(Protocol):
    """A causal language model whose weights can be exchanged."""

    def forward(self, ids_N: torch.Tensor, positions_N: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Hidden states (N, H) of flat tokens."""
        ...

    def logits(self, hidden_B_H: torch.Tensor) -> torch.Tensor:
        """(B, V) in the model's dtype."""
        ...

    def load(self, weights: Weights) -> bool:
        """Take weights by layer name; True when one of them differs from what was held."""
        ...

    def holds(self, weights: Weights) -> list[str]:
        """Names among these whose weight is not, bit for bit, the one held."""
        ...


def make_decoder(model: Any) -> Decoder:
    """The fastest decoder that agrees with the model; parameters other than linear ones are shared."""
    packs = model.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if packs and _is_llama_shaped(model):
        lean = LeanDecoder(model)
        difference = _difference(lean, model)
        if difference <= 0.1:
            return lean
        log.warning(
            "the fused decoder differs from transformers' %s by %.2g; using transformers' own modules",
            model.config.model_type,
            difference,
        )
    return ModulesDecoder(model, packs=packs)


@torch.inference_mode()
def _difference(decoder: Decoder, model: Any) -> float:
    """Largest difference of logprobs on a few tokens."""
    ids = torch.arange(10, 26) % model.config.get_text_config().vocab_size
    positions, plan = torch.arange(len(ids)), TreePlan([(0, len(ids), -1)])
    ours = decoder.logits(decoder.forward(ids, positions, plan))
    output = model.get_decoder()(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, plan=plan
    )
    theirs = model.get_output_embeddings()(output.last_hidden_state[0])
    top = theirs.float().log_softmax(-1).topk(8)
    return float((ours.float().log_softmax(-1).gather(1, top.indices) - top.values).abs().mean())


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is kept in oneDNN's own order where the CPU has oneDNN.

    It may hold several layers that read the same input, one below the other.
    """

    def __init__(self, *sources: torch.nn.Linear, packs: bool) -> None:
        super().__init__()
        biases = [source.bias for source in sources if source.bias is not None]
        assert len(biases) in (0, len(sources)), "fused layers have a bias all or none"
        self.bias = torch.cat([b.detach() for b in biases]) if biases else None
        self.sizes = [source.out_features for source in sources]
        self.packs = packs
        self.weight: torch.Tensor
        self.load([source.weight for source in sources])

    def load(self, weights: list[torch.Tensor]) -> None:
        weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if self.packs else weight

    def plain(self) -> list[torch.Tensor]:
        """The weights in ordinary row-major order."""
        weight = self.weight.to_dense() if self.packs else self.weight
        return list(weight.split(self.sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packs:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")


class _Exchangeable:
    """Layers by name: linear ones, some of them fused, and others whose weight is used as it is."""

    def __init__(self, model: Any) -> None:
        self.fused: dict[PackedLinear, list[str]] = {}
        self.home: dict[str, PackedLinear] = {}
        self.others: dict[str, Any] = {}
        names = {module: name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.tied = {names[embedding]: names[head]} if embedding.weight is head.weight else {}
        """The output layer that takes an embedding's weight too."""

    def add(self, packed: PackedLinear, *names: str) -> PackedLinear:
        self.fused[packed] = list(names)
        self.home.update(dict.fromkeys(names, packed))
        return packed

    def load(self, weights: Weights) -> bool:
        changed, weights = False, self._with_tied(weights)
        for name in weights.keys() - self.home.keys():
            if not torch.equal(self.others[name].weight, weights[name]):
                self.others[name].weight = torch.nn.Parameter(weights[name].detach().clone(), False)
                changed = True
        for packed in {self.home[name]: None for name in weights if name in self.home}:
            held = dict(zip(self.fused[packed], packed.plain(), strict=True))
            new = {name: weights.get(name, old) for name, old in held.items()}
            if not all(torch.equal(new[name], held[name]) for name in held):
                # a weight that is not packed would be the trainer's own, which its next update changes
                packed.load([weight if packed.packs else weight.detach().clone() for weight in new.values()])
                changed = True
        return changed

    def holds(self, weights: Weights) -> list[str]:
        weights = self._with_tied(weights)
        others = weights.keys() - self.home.keys()
        wrong = [name for name in others if not torch.equal(self.others[name].weight, weights[name])]
        for packed in {self.home[name]: None for name in weights if name in self.home}:
            for name, held in zip(self.fused[packed], packed.plain(), strict=True):
                if name in weights and not torch.equal(held, weights[name]):
                    wrong.append(name)
        return wrong

    def _with_tied(self, weights: Weights) -> Weights:
        return {**weights, **{head: weights[name] for name, head in self.tied.items() if name in weights}}


class ModulesDecoder:
    """transformers' own modules; only the linear layers are packed copies."""

    def __init__(self, model: Any, *, packs: bool) -> None:
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, shared).eval()
        self.linears = _Exchangeable(model)
        for name, module in list(self.model.named_modules()):
            if not isinstance(module, torch.nn.Linear):
                if module._parameters.get("weight") is not None:
                    self.linears.others[name] = module
            else:
                parent, _, leaf = name.rpartition(".")
                packed = self.linears.add(PackedLinear(module, packs=packs), name)
                setattr(self.model.get_submodule(parent), leaf, packed)
        self.load, self.holds = self.linears.load, self.linears.holds

    def forward(self, ids_N: torch.Tensor, positions_N: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        decoder = self.model.get_decoder()
        output = decoder(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, plan=plan)
        return output.last_hidden_state[0]

    def logits(self, hidden_B_H: torch.Tensor) -> torch.Tensor:
        return self.model.get_output_embeddings()(hidden_B_H)


def _is_llama_shaped(model: Any) -> bool:
    config = model.config
    return config.model_type in ("llama", "mistral", "qwen2", "qwen3") and config.hidden_act == "silu"


class _Norm:
    def __init__(self, module: Any, name: str, linears: _Exchangeable) -> None:
        self.weight, self.eps = module.weight, module.variance_epsilon
        linears.others[name] = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _Layer:
    """One decoder layer: names of its linear layers start with ``prefix``."""

    def __init__(self, layer: Any, prefix: str, linears: _Exchangeable) -> None:
        attention, mlp = layer.self_attn, layer.mlp

        def pack(part: str, *names: str) -> PackedLinear:
            module = layer.get_submodule(part)
            packed = PackedLinear(*(getattr(module, n) for n in names), packs=True)
            return linears.add(packed, *(f"{prefix}.{part}.{n}" for n in names))

        self.qkv = pack("self_attn", "q_proj", "k_proj", "v_proj")
        self.out = pack("self_attn", "o_proj")
        self.gate, self.up, self.down = (pack("mlp", n) for n in ("gate_proj", "up_proj", "down_proj"))

        def norm(name: str) -> _Norm:
            return _Norm(layer.get_submodule(name), f"{prefix}.{name}", linears)

        self.before, self.after = norm("input_layernorm"), norm("post_attention_layernorm")
        self.scaling, self.head_dim = attention.scaling, attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.index = attention.layer_idx
        self.q_norm = norm("self_attn.q_norm") if hasattr(attention, "q_norm") else None
        self.k_norm = norm("self_attn.k_norm") if hasattr(attention, "k_norm") else None
        assert isinstance(mlp.gate_proj, torch.nn.Linear)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """x (N, H); cos (N, 1, D), sin (N, 1, D/2)."""
        qkv = self.qkv(self.before(x)).view(len(x), -1, self.head_dim)
        turned = qkv[:, : self.heads + self.kv_heads]
        if self.q_norm and self.k_norm:
            q, k = turned.split([self.heads, self.kv_heads], dim=1)
            turned = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        half = self.head_dim // 2
        rotated = turned * cos
        rotated[..., :half].addcmul_(turned[..., half:], sin, value=-1)
        rotated[..., half:].addcmul_(turned[..., :half], sin)
        q, k = rotated[:, : self.heads], rotated[:, self.heads :]
        v = qkv[:, self.heads + self.kv_heads :]
        attended = plan.attend(self.index, q, k, v, self.scaling).reshape(len(x), -1)
        x = self.out.plus(attended, x)
        normed = self.after(x)
        return self.down.plus(self.up.times(normed, self.gate.silu(normed)), x)


class _Table:
    """An embedding's weight (V, H): the module is a trainer's as well, which may give it another one."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class LeanDecoder:
    """A decoder of Llama's shape (Llama, Mistral, Qwen2, Qwen3) with fused kernels."""

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        prefix = next(name for name, module in model.named_modules() if module is decoder)
        self.linears = _Exchangeable(model)
        self.embed = _Table(decoder.embed_tokens.weight)
        self.linears.others[f"{prefix}.embed_tokens"] = self.embed
        self.rotary = copy.deepcopy(decoder.rotary_emb)
        self.layers = [
            _Layer(layer, f"{prefix}.layers.{i}", self.linears) for i, layer in enumerate(decoder.layers)
        ]
        self.norm = _Norm(decoder.norm, f"{prefix}.norm", self.linears)
        self.head = self.linears.add(PackedLinear(model.get_output_embeddings(), packs=True), "lm_head")
        self.load, self.holds = self.linears.load, self.linears.holds

    def forward(self, ids_N: torch.Tensor, positions_N: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        x = F.embedding(ids_N, self.embed.weight)
        cos, sin = self.rotary(x, positions_N[None])
        cos, sin = cos[0, :, None], sin[0, :, None, : sin.shape[-1] // 2]
        for layer in self.layers:
            x = layer.forward(x, cos, sin, plan)
        return self.norm(x)

    def logits(self, hidden_B_H: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_B_H)
