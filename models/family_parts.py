"""The parts of a `config.json` that several model families write the same way."""

import math

from jaxsched.models.config import (
    AttentionConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    RotaryConfig,
)
from jaxsched.models.keys import Keys

_LAYER_NAMES = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "hybrid": "hybrid",
    "mlp": "mlp",
    "moe": "moe",
}


def layer_names(keys: Keys, name: str, allowed: tuple[str, ...]) -> list[str]:
    found = keys.list(name)
    for item in found:
        if _LAYER_NAMES.get(item) not in allowed:
            known = [key for key, kind in _LAYER_NAMES.items() if kind in allowed]
            raise keys.error(name, item, f"a list of {known}")
    return [_LAYER_NAMES[item] for item in found]


def rotary(keys: Keys, head_dim: int, factor: float | None = None) -> RotaryConfig:
    """Rotary settings, in the new `rope_parameters` form or the older loose keys."""
    rope = keys.sub("rope_parameters", "rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "linear"):
        raise rope.error("rope_type", kind, "'default' or 'linear'")
    share = 1.0
    if factor is not None:
        share = rope.number("partial_rotary_factor", factor)
    return RotaryConfig(
        dim=int(head_dim * share),
        theta=rope.number("rope_theta", keys.number("rope_theta", 10000.0)),
        scaling_factor=rope.number("factor", 1.0) if kind == "linear" else 1.0,
    )


def attention(keys: Keys, **fields) -> AttentionConfig:
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    head_dim = fields.pop("head_dim", None)
    if head_dim is None:
        head_dim = keys.whole("head_dim", hidden // heads)
    fields.setdefault("scale", head_dim**-0.5)
    fields.setdefault("in_size", hidden)
    fields.setdefault("bias", keys.flag("attention_bias", False))
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=keys.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        **fields,
    )


def mamba_with_prefixed_keys(keys: Keys, **fields) -> MambaConfig:
    """The mixer of the families whose keys all begin with `mamba_`."""
    inner = fields.pop("inner_size", keys.whole("mamba_expand", 2) * hidden_size(keys))
    heads = keys.whole("mamba_n_heads", 128)
    head_dim = keys.whole("mamba_d_head", inner // heads, automatic=True)
    if heads * head_dim != inner:
        right = f"{inner // heads}, as {heads} heads must give {inner} channels"
        raise keys.error("mamba_d_head", head_dim, right)
    keys.choice("hidden_act", "silu", ("silu", "swish"))
    bias = keys.flag("mamba_proj_bias", False)
    fields.setdefault("out_bias", bias)
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        state_size=keys.whole("mamba_d_state", 256),
        num_groups=keys.whole("mamba_n_groups", 1),
        conv_width=keys.whole("mamba_d_conv", 4),
        chunk_size=keys.whole("mamba_chunk_size", 256),
        in_bias=bias,
        conv_bias=keys.flag("mamba_conv_bias", True),
        time_step_limit=keys.pair("time_step_limit", (0.0, math.inf)),
        norm_eps=fields.pop("norm_eps", keys.number("rms_norm_eps", 1e-5)),
        **fields,
    )


def hidden_size(keys: Keys) -> int:
    return keys.whole("hidden_size")


def model(keys: Keys, **fields) -> ModelConfig:
    fields.setdefault("norm_eps", keys.number("rms_norm_eps", 1e-5))
    return ModelConfig(
        family=keys.text("model_type"),
        vocab_size=keys.whole("vocab_size"),
        hidden_size=hidden_size(keys),
        tie_embeddings=keys.flag(
            "tie_word_embeddings", fields.pop("tie_embeddings", False)
        ),
        **fields,
    )


def gated_mlp(keys: Keys, **fields) -> MlpConfig:
    return MlpConfig(
        size=keys.whole("intermediate_size"),
        activation=keys.activation("hidden_act", "silu"),
        bias=keys.flag("mlp_bias", False),
        **fields,
    )
