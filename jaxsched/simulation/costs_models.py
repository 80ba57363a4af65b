"""What a model computes in a step: its layers as matrix products, scores and scans.

Widths that the sizing of the cache knows (weights, keys and values, states) come from
its layer shapes; only what those leave out is asked for here: query heads, experts of
a token, tokens of a scan's chunk. Formulas: Mamba-2 (arXiv 2405.21060), gated delta
net (arXiv 2412.06464), Nemotron-H (arXiv 2504.03624).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from jaxsched.cache.sizing_layers import LayerShape
from jaxsched.cache.sizing_models import PUBLIC_MODELS, build_layers
from jaxsched.cache.sizing_shapes import ModelShape, find_model, public_model
from jaxsched.core.host import check_count

_SCAN_CHUNK = {"mamba2": 256, "gated_delta_net": 64, "kimi_delta_attention": 64}
_TOP_K = {
    "Nemotron-3-Nano-30B-A3B": 6,
    "Nemotron-3-Super-120B-A12B": 22,
    "Granite-4.0-H-Tiny": 6,
    "Granite-4.0-H-Small": 10,
    "Jamba-v0.1": 2,
    "Qwen3-Next-80B-A3B": 10,
    "Kimi-Linear-48B-A3B": 8,
}
_CHUNK_128 = ("Nemotron", "Falcon-H1-0.5B", "Falcon-H1-3B", "Falcon-H1-7B")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What layer shapes leave out.

    Attributes:
      hidden: width of the residual stream.
      vocab: rows of the LM head.
      num_heads: query heads of an attention layer; 0: the model has none.
      latent: widths (rank, rope, nope, value) of latent attention.
      num_experts, experts_per_token: routed experts of a layer, and of a token.
      expert_params: weights of one routed expert.
      scan_chunk: tokens that a scan takes at a time.
      gated: feed-forward layers have a gate.
    """

    hidden: int
    vocab: int
    num_heads: int = 0
    latent: tuple[int, int, int, int] = (0, 0, 0, 0)
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    scan_chunk: int = 0
    gated: bool = True

    def __post_init__(self):
        check_count("hidden", self.hidden, low=1)
        check_count("vocab", self.vocab, low=1)
        if self.num_experts:
            check_count(
                "experts_per_token", self.experts_per_token, 1, self.num_experts
            )
            check_count("expert_params", self.expert_params, low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model whose steps can be costed."""

    name: str
    layers: tuple[LayerShape, ...]
    facts: ModelFacts
    num_params: int

    @property
    def shape(self) -> ModelShape:
        """The same model for the sizing of the cache."""
        inside = sum(layer.num_params for layer in self.layers)
        return ModelShape(
            name=self.name,
            layers=self.layers,
            num_embedding_params=self.num_params - inside,
        )


def describe_model(name: str | Mapping) -> ModelDescription:
    """A packaged model, the model of a `config.json`, or of a dict of facts.

    Args:
      name: a packaged name, a path of a `config.json` or of a folder with one, or a
        dict with the keys of `sizing_models.PUBLIC_MODELS` and besides, where there
        are experts, `experts_per_token`; `scan_chunk` and `name` are optional.

    Raises:
      ValueError: naming the key, the file or the name that is wrong.
    """
    if isinstance(name, Mapping):
        return _of_facts(str(name.get("name", "custom")), name)
    known = {model.lower(): model for model in PUBLIC_MODELS}
    if name.lower() in known:
        return _of_facts(known[name.lower()], PUBLIC_MODELS[known[name.lower()]])
    shape = find_model(name)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    config = json.loads(path.read_text(encoding="utf-8"))
    try:
        return _of_config(shape, config)
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from wrong


def _of_facts(name: str, facts: Mapping) -> ModelDescription:
    for key in ("order", "hidden", "vocab"):
        if key not in facts:
            raise ValueError(f"model {name!r}: {key} is missing")
    shape_name = name if name in PUBLIC_MODELS else None
    layers = build_layers(facts)
    experts, inner, _, gated, latent = facts.get("moe", (0, 0, 0, True, 0))
    per_token = facts.get("experts_per_token", _TOP_K.get(name, 0))
    if experts and not per_token:
        raise ValueError(f"model {name!r}: experts_per_token is missing")
    tables = 1 if facts.get("tied", False) else 2
    params = sum(layer.num_params for layer in layers)
    if shape_name:
        params = public_model(shape_name).num_params
    else:
        params += tables * facts["vocab"] * facts["hidden"]
    chunk = facts.get("scan_chunk", 128 if name.startswith(_CHUNK_128) else 0)
    return ModelDescription(
        name=name,
        layers=layers,
        num_params=params,
        facts=ModelFacts(
            hidden=facts["hidden"],
            vocab=facts["vocab"],
            num_heads=facts.get("heads", facts.get("latent", (0,)))[0],
            latent=tuple(facts["latent"][1:]) if "latent" in facts else (0, 0, 0, 0),
            num_experts=experts,
            experts_per_token=per_token,
            expert_params=(latent or facts["hidden"]) * inner * (3 if gated else 2),
            scan_chunk=chunk or _default_chunk(layers),
            gated=facts["mlp"][1] if "mlp" in facts else gated,
        ),
    )


def _default_chunk(layers: tuple[LayerShape, ...]) -> int:
    found = (_SCAN_CHUNK[layer.kind] for layer in layers if layer.kind in _SCAN_CHUNK)
    return next(found, 1)


def _of_config(shape: ModelShape, config: Mapping) -> ModelDescription:
    """What the sizing's readers found, and the keys that only costs need."""
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]

    def first(*keys: str, default: int = 0) -> int:
        for key in keys:
            if config.get(key) is not None:
                return check_count(key, config[key], low=0)
        return default

    gated = config.get("model_type") != "nemotron_h"
    hidden = first("hidden_size")
    experts, per_token, inner = 0, 0, 0
    if any(layer.kind == "mixture_of_experts" for layer in shape.layers):
        experts = first("n_routed_experts", "num_local_experts", "num_experts")
        per_token = first("num_experts_per_tok", "num_experts_per_token")
        if not per_token:
            raise ValueError("num_experts_per_tok is missing")
        inner = first("moe_intermediate_size", "intermediate_size")
    wide = first("moe_latent_size") or hidden
    attends = any(layer.num_kv_heads for layer in shape.layers)
    if attends and not first("num_attention_heads"):
        raise ValueError("num_attention_heads is missing")
    chunk = first("chunk_size", "mamba_chunk_size")
    latent = tuple(
        first(key)
        for key in (
            "kv_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
        )
    )
    return ModelDescription(
        name=shape.name,
        layers=shape.layers,
        num_params=shape.num_params,
        facts=ModelFacts(
            hidden=hidden,
            vocab=first("vocab_size"),
            num_heads=first("num_attention_heads") if attends else 0,
            latent=latent,
            num_experts=experts,
            experts_per_token=per_token,
            expert_params=wide * inner * (3 if gated else 2),
            scan_chunk=chunk or _default_chunk(shape.layers),
            gated=gated,
        ),
    )
