"""Where each parameter of a model lies in a published checkpoint, family by family.

`sources(config)` maps every parameter name of `parameter_shapes` to a `Source`: the
tensors to read and how to join them. Names are those of `save_pretrained` in
transformers 5.24.0, which are the names on the hub.
"""

import dataclasses

from jaxsched.models.config import Layer, ModelConfig
from jaxsched.models.parameters import parameter_shapes


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensors that make one parameter: joined along rows, stacked, or taken as is."""

    names: tuple[str, ...]
    how: str = "rows"  # "rows": concatenate along axis 0; "stack": a new axis 0


_ROOTS = {"mamba2": "backbone", "nemotron_h": "backbone"}
_EMBEDDINGS = {"mamba2": "embeddings", "nemotron_h": "embeddings"}
_FINAL_NORMS = {
    "mamba2": "norm_f",
    "nemotron_h": "norm_f",
    "granitemoehybrid": "norm",
}
_QKV = ("q_proj", "k_proj", "v_proj")


def sources(config: ModelConfig) -> dict[str, Source]:
    """The published tensors behind every parameter of the model."""
    family = config.family
    root = _ROOTS.get(family, "model")
    found = {
        "embed": Source((f"{root}.{_EMBEDDINGS.get(family, 'embed_tokens')}",)),
        "final_norm": Source(
            (f"{root}.{_FINAL_NORMS.get(family, 'final_layernorm')}",)
        ),
        "lm_head": Source(("lm_head",)),
    }
    uses, homes = 0, {}
    for index, layer in enumerate(config.layers):
        prefix = f"{root}.layers.{index}"
        home = homes.setdefault(layer.shared_block, prefix)
        for name, source in _layer(config, layer, prefix, home, uses).items():
            # A shared block is published with the first layer that uses it.
            found.setdefault(
                name if name.startswith("shared.") else f"layers.{index}.{name}", source
            )
        uses += layer.mixer == "shared"
    return {name: _leaf(found, name) for name in parameter_shapes(config)}


def published_shapes(
    config: ModelConfig, name: str, source: Source, shape: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The shape that each tensor of a parameter's source must have, in order."""
    if source.how == "stack":
        return [shape[1:]] * len(source.names)
    if name.endswith("conv.weight"):
        return [(shape[0], 1, shape[1])]
    rows = [shape[0] // len(source.names)] * len(source.names)
    if len(source.names) == len(_QKV) and ".qkv." in name:
        attention = config.attention
        heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        rows = [count * attention.head_dim for count in heads]
    return [(count, *shape[1:]) for count in rows]


def _leaf(found: dict[str, Source], name: str) -> Source:
    """The source of a parameter: a module's names, with the leaf's name appended."""
    if name in found:
        return found[name]
    module, _, leaf = name.rpartition(".")
    source = found[module]
    return Source(tuple(f"{base}.{leaf}" for base in source.names), source.how)


def _layer(
    config: ModelConfig, layer: Layer, prefix: str, home: str, use: int
) -> dict[str, Source]:
    if config.family in ("mamba2", "nemotron_h"):
        return _single_mixer(config, layer, prefix)
    if config.family == "zamba2":
        return _zamba2(layer, prefix, home, use)
    return _two_branches(config, prefix)


def _single_mixer(config: ModelConfig, layer: Layer, prefix: str) -> dict[str, Source]:
    """Families whose blocks hold one norm and one `mixer` of any kind."""
    mixer = f"{prefix}.mixer"
    found = {"norm": Source((f"{prefix}.norm",))}
    if layer.has_mamba:
        return found | _mamba(mixer)
    if layer.has_attention:
        return found | _attention(mixer)
    if layer.feed_forward == "mlp":
        return found | _plain_mlp("mlp", mixer)
    experts = range(config.moe.num_experts)
    for name in ("up", "down"):
        found[f"moe.experts.{name}"] = Source(
            tuple(f"{mixer}.experts.{e}.{name}_proj.weight" for e in experts), "stack"
        )
    return found | {
        "moe.router": Source((f"{mixer}.gate",)),
        "moe.router.bias": Source((f"{mixer}.gate.e_score_correction_bias",)),
        "moe.latent_in": Source((f"{mixer}.fc1_latent_proj",)),
        "moe.latent_out": Source((f"{mixer}.fc2_latent_proj",)),
        **_plain_mlp("moe.shared", f"{mixer}.shared_experts"),
    }


def _two_branches(config: ModelConfig, prefix: str) -> dict[str, Source]:
    """Families whose layers hold a mixer and then a feed-forward, each with a norm."""
    second = "pre_ff_layernorm"
    if config.family == "granitemoehybrid":
        second = "post_attention_layernorm"
    moe, shared = f"{prefix}.block_sparse_moe", f"{prefix}.shared_mlp"
    mlp = _gated_mlp("mlp", f"{prefix}.feed_forward")
    if config.family == "granitemoehybrid":
        mlp = _fused_mlp("mlp", shared) | _fused_mlp("moe.shared", shared)
    return {
        "norm": Source((f"{prefix}.input_layernorm",)),
        "ffn_norm": Source((f"{prefix}.{second}",)),
        **_mamba(f"{prefix}.mamba"),
        **_attention(f"{prefix}.self_attn"),
        **mlp,
        "moe.router": Source((f"{moe}.router.layer",)),
        "moe.experts.up": Source((f"{moe}.input_linear.weight",)),
        "moe.experts.down": Source((f"{moe}.output_linear.weight",)),
    }


def _zamba2(layer: Layer, prefix: str, home: str, use: int) -> dict[str, Source]:
    if layer.mixer != "shared":
        return {
            "norm": Source((f"{prefix}.input_layernorm",)),
            **_mamba(f"{prefix}.mamba"),
        }
    decoder, block = f"{prefix}.mamba_decoder", f"{home}.shared_transformer"
    own = f"shared.{layer.shared_block}"
    found = {
        "norm": Source((f"{decoder}.input_layernorm",)),
        "linear": Source((f"{prefix}.linear",)),
        **_mamba(f"{decoder}.mamba"),
        f"{own}.norm": Source((f"{block}.input_layernorm",)),
        f"{own}.ffn_norm": Source((f"{block}.pre_ff_layernorm",)),
    }
    shared = _attention(f"{block}.self_attn") | {
        "mlp.up": Source((f"{block}.feed_forward.gate_up_proj",)),
        "mlp.down": Source((f"{block}.feed_forward.down_proj",)),
    }
    found |= {f"{own}.{name}": source for name, source in shared.items()}
    # Adapters hang in the block that first held the weights, numbered by use.
    return found | {
        f"adapters.{name}_{part}": Source((f"{where}_adapter_list.{use}.{column}",))
        for name, where in (
            *((n, f"{block}.self_attn.linear_{n}") for n in "qkv"),
            ("mlp", f"{block}.feed_forward.gate_up_proj"),
        )
        for column, part in enumerate(("down", "up"))
    }


def _mamba(prefix: str) -> dict[str, Source]:
    return {
        "mamba.in_proj": Source((f"{prefix}.in_proj",)),
        "mamba.conv": Source((f"{prefix}.conv1d",)),
        "mamba.norm": Source((f"{prefix}.norm",)),
        "mamba.out_proj": Source((f"{prefix}.out_proj",)),
        "mamba": Source((prefix,)),
    }


def _attention(prefix: str) -> dict[str, Source]:
    return {
        "attention.qkv": Source(tuple(f"{prefix}.{name}" for name in _QKV)),
        "attention.out": Source((f"{prefix}.o_proj",)),
    }


def _plain_mlp(name: str, prefix: str) -> dict[str, Source]:
    return {
        f"{name}.up": Source((f"{prefix}.up_proj",)),
        f"{name}.down": Source((f"{prefix}.down_proj",)),
    }


def _gated_mlp(name: str, prefix: str) -> dict[str, Source]:
    return {
        f"{name}.up": Source((f"{prefix}.gate_proj", f"{prefix}.up_proj")),
        f"{name}.down": Source((f"{prefix}.down_proj",)),
    }


def _fused_mlp(name: str, prefix: str) -> dict[str, Source]:
    return {
        f"{name}.up": Source((f"{prefix}.input_linear",)),
        f"{name}.down": Source((f"{prefix}.output_linear",)),
    }
