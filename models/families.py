"""From a Hugging Face `config.json` to a `ModelConfig`, one function a family.

Sources: the `configuration_*.py` and `modeling_*.py` files of transformers 5.24.0 (key
names, defaults, and which keys are read at all). Both the 5.x layer names and the older
ones (`mamba`, `attention`, `hybrid_override_pattern`, ...) are read.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxsched.models import family_parts as parts
from jaxsched.models.config import (
    Layer,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    SharedBlockConfig,
)
from jaxsched.models.keys import Keys

_PATTERN_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read_config(folder: str | Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint folder.

    Raises:
      ValueError: if the file cannot be read, is not JSON, names a family that is not
        supported, or holds a value that does not fit; the text names file and key.
    """
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as wrong:
        raise ValueError(f"{path}: cannot be read: {wrong.strerror}") from wrong
    except ValueError as wrong:
        raise ValueError(f"{path}: not valid JSON: {wrong}") from wrong
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(values)}")
    return parse_config(values, str(path))


def parse_config(values: Mapping[str, object], where: str = "config") -> ModelConfig:
    """The `ModelConfig` of a parsed `config.json`; `where` opens every complaint."""
    keys = Keys(values, where)
    family = keys.text("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise keys.error("model_type", family, f"one of {known}")
    try:
        return FAMILIES[family](keys)
    except ValueError as wrong:
        if str(wrong).startswith(where):
            raise
        raise ValueError(f"{where}: {wrong}") from wrong


def with_chunk_size(config: ModelConfig, chunk_size: int) -> ModelConfig:
    """The same model on another scan grid; it changes bits, not mathematics."""
    mamba = dataclasses.replace(config.mamba, chunk_size=chunk_size)
    return dataclasses.replace(config, mamba=mamba)


def _mamba2(keys: Keys) -> ModelConfig:
    heads, head_dim = keys.whole("num_heads", 128), keys.whole("head_dim", 64)
    inner = keys.whole("expand", 2) * parts.hidden_size(keys)
    if heads * head_dim != inner:
        right = f"{inner // heads}, as {heads} heads must give {inner} channels"
        raise keys.error("head_dim", head_dim, right)
    keys.choice("hidden_act", "silu", ("silu", "swish"))
    eps, bias = keys.number("layer_norm_epsilon", 1e-5), keys.flag("use_bias", False)
    mamba = MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        state_size=keys.whole("state_size", 128),
        num_groups=keys.whole("n_groups", 8),
        conv_width=keys.whole("conv_kernel", 4),
        chunk_size=keys.whole("chunk_size", 256),
        in_bias=bias,
        out_bias=bias,
        conv_bias=keys.flag("use_conv_bias", True),
        norm_eps=eps,
        time_step_limit=keys.pair("time_step_limit", (0.0, math.inf)),
    )
    return parts.model(
        keys,
        norm_eps=eps,
        layers=(Layer(mixer="mamba"),) * keys.whole("num_hidden_layers"),
        mamba=mamba,
        residual_in_float32=keys.flag("residual_in_fp32", True),
    )


def _bamba(keys: Keys) -> ModelConfig:
    attention_at = keys.list("attn_layer_indices", ())
    layers = tuple(
        Layer(mixer="attention" if i in attention_at else "mamba", feed_forward="mlp")
        for i in range(keys.whole("num_hidden_layers"))
    )
    head_dim = keys.whole(
        "head_dim", parts.hidden_size(keys) // keys.whole("num_attention_heads")
    )
    return parts.model(
        keys,
        layers=layers,
        mamba=parts.mamba_with_prefixed_keys(keys),
        attention=parts.attention(
            keys, head_dim=head_dim, rotary=parts.rotary(keys, head_dim, factor=0.5)
        ),
        mlp=parts.gated_mlp(keys),
    )


def _falcon_h1(keys: Keys) -> ModelConfig:
    inner = keys.whole(
        "mamba_d_ssm", keys.whole("mamba_expand", 2) * parts.hidden_size(keys)
    )
    gate = "gate_only"
    if keys.flag("mamba_rms_norm", False):
        first = keys.flag("mamba_norm_before_gate", True)
        gate = "norm_then_gate" if first else "gate_then_norm"
    head_dim = keys.whole(
        "head_dim", parts.hidden_size(keys) // keys.whole("num_attention_heads")
    )
    gate_multiplier, down_multiplier = keys.numbers("mlp_multipliers", (1.0, 1.0))
    return parts.model(
        keys,
        layers=(Layer(mixer="parallel", feed_forward="mlp"),)
        * keys.whole("num_hidden_layers"),
        mamba=parts.mamba_with_prefixed_keys(
            keys,
            inner_size=inner,
            gate=gate,
            out_bias=keys.flag("projectors_bias", False),
            in_multiplier=keys.number("ssm_in_multiplier", 1.0),
            multipliers=keys.numbers("ssm_multipliers", (1.0,) * 5),
            out_multiplier=keys.number("ssm_out_multiplier", 1.0),
        ),
        attention=parts.attention(
            keys,
            head_dim=head_dim,
            rotary=parts.rotary(keys, head_dim),
            in_multiplier=keys.number("attention_in_multiplier", 1.0),
            key_multiplier=keys.number("key_multiplier", 1.0),
            out_multiplier=keys.number("attention_out_multiplier", 1.0),
        ),
        mlp=parts.gated_mlp(
            keys, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier
        ),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        logits_multiplier=keys.number("lm_head_multiplier", 1.0),
    )


def _granitemoehybrid(keys: Keys) -> ModelConfig:
    count = keys.whole("num_hidden_layers")
    names = ["mamba"] * count
    if keys.has("layer_types", "layers_block_type"):
        names = parts.layer_names(
            keys,
            "layer_types" if keys.has("layer_types") else "layers_block_type",
            ("mamba", "attention"),
        )
    if len(names) != count:
        raise keys.error("layer_types", f"{len(names)} entries", f"{count} entries")
    shared = MlpConfig(
        size=keys.whole("shared_intermediate_size", 1024),
        activation=keys.activation("hidden_act", "silu"),
    )
    experts = keys.whole("num_local_experts", 8, least=0)
    expert = dataclasses.replace(shared, size=keys.whole("intermediate_size"))
    kind = "moe" if experts else "mlp"
    head_dim = keys.whole(
        "head_dim", parts.hidden_size(keys) // keys.whole("num_attention_heads")
    )
    rotary = keys.choice("position_embedding_type", None, (None, "rope", "nope"))
    eps = keys.number("rms_norm_eps", 1e-6)
    return parts.model(
        keys,
        norm_eps=eps,
        layers=tuple(Layer(mixer=name, feed_forward=kind) for name in names),
        mamba=parts.mamba_with_prefixed_keys(keys, norm_eps=eps),
        attention=parts.attention(
            keys,
            head_dim=head_dim,
            scale=keys.number("attention_multiplier", 1.0),
            rotary=parts.rotary(keys, head_dim) if rotary == "rope" else None,
        ),
        mlp=shared,
        moe=MoeConfig(
            num_experts=experts,
            top_k=keys.whole("num_experts_per_tok", 2),
            expert=expert,
            shared=shared,
        )
        if experts
        else None,
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        residual_multiplier=keys.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / keys.number("logits_scaling", 1.0),
    )


def _nemotron_h(keys: Keys) -> ModelConfig:
    keys.choice("mamba_hidden_act", "silu", ("silu", "swish"))
    eps = keys.number("layer_norm_epsilon", 1e-5)
    bias = keys.flag("use_bias", False)
    activation = keys.activation("mlp_hidden_act", "relu2")
    mlp_bias = keys.flag("mlp_bias", False)
    layers = tuple(
        Layer(mixer="none", feed_forward=name)
        if name in ("mlp", "moe")
        else Layer(mixer=name)
        for name in _nemotron_layers(keys)
    )
    mamba = MambaConfig(
        num_heads=keys.whole("mamba_num_heads", 128),
        head_dim=keys.whole("mamba_head_dim", 64),
        state_size=keys.whole("ssm_state_size", 128),
        num_groups=keys.whole("mamba_n_groups", keys.whole("n_groups", 8)),
        conv_width=keys.whole("mamba_d_conv", keys.whole("conv_kernel", 4)),
        chunk_size=keys.whole("mamba_chunk_size", keys.whole("chunk_size", 128)),
        in_bias=bias,
        out_bias=bias,
        conv_bias=keys.flag("mamba_conv_bias", keys.flag("use_conv_bias", True)),
        norm_eps=eps,
        # The family has no upper limit and does not read time_step_limit.
        time_step_limit=(
            keys.number("mamba_dt_min", keys.number("time_step_min", 0.001)),
            math.inf,
        ),
    )
    mlp = MlpConfig(
        size=keys.whole("intermediate_size", 21504),
        activation=activation,
        gated=False,
        bias=mlp_bias,
    )
    head_dim = keys.whole("head_dim", keys.whole("attention_head_dim", 128))
    return parts.model(
        keys,
        norm_eps=eps,
        layers=layers,
        mamba=mamba,
        attention=parts.attention(keys, head_dim=head_dim, bias=False),
        mlp=mlp,
        moe=_nemotron_moe(keys, mlp)
        if any(layer.feed_forward == "moe" for layer in layers)
        else None,
    )


def _nemotron_layers(keys: Keys) -> list[str]:
    for name in ("layers_block_type", "layer_types"):
        if keys.has(name):
            return parts.layer_names(keys, name, ("mamba", "attention", "mlp", "moe"))
    pattern = keys.text("hybrid_override_pattern")
    for letter in pattern:
        if letter not in _PATTERN_LETTERS:
            letters = " ".join(_PATTERN_LETTERS)
            raise keys.error("hybrid_override_pattern", letter, f"made of {letters}")
    return [_PATTERN_LETTERS[letter] for letter in pattern]


def _nemotron_moe(keys: Keys, mlp: MlpConfig) -> MoeConfig:
    experts = keys.whole("n_routed_experts", 8)
    return MoeConfig(
        num_experts=experts,
        top_k=keys.whole("num_experts_per_tok", 2),
        expert=dataclasses.replace(
            mlp, size=keys.whole("moe_intermediate_size", 7688), bias=False
        ),
        shared=dataclasses.replace(
            mlp, size=keys.whole("moe_shared_expert_intermediate_size", 7688)
        ),
        router="sigmoid_groups",
        latent_size=keys.whole("moe_latent_size", 0, least=0),
        latent_bias=mlp.bias,
        num_groups=keys.whole("n_group", 1),
        top_groups=keys.whole("topk_group", 1),
        normalise=keys.flag("norm_topk_prob", True),
        scaling=keys.number("routed_scaling_factor", 1.0),
    )


def _zamba2(keys: Keys) -> ModelConfig:
    hidden, heads = parts.hidden_size(keys), keys.whole("num_attention_heads")
    count = keys.whole("num_mem_blocks", 1)
    names = parts.layer_names(keys, "layers_block_type", ("mamba", "hybrid"))
    layers, uses = [], 0
    for name in names:
        if name == "hybrid":
            layers.append(Layer(mixer="shared", shared_block=uses % count))
            uses += 1
        else:
            layers.append(Layer(mixer="mamba"))
    inner = keys.whole("mamba_expand", 2) * hidden
    mamba_heads = keys.whole("n_mamba_heads", 8)
    head_dim = 2 * hidden // heads
    bias = keys.flag("add_bias_linear", False)
    return parts.model(
        keys,
        layers=tuple(layers),
        tie_embeddings=True,
        mamba=MambaConfig(
            num_heads=mamba_heads,
            head_dim=inner // mamba_heads,
            state_size=keys.whole("mamba_d_state", 64),
            num_groups=keys.whole("mamba_ngroups", 1),
            conv_width=keys.whole("mamba_d_conv", 4),
            chunk_size=keys.whole("chunk_size", 256),
            in_bias=bias,
            out_bias=bias,
            conv_bias=True,  # always present, whatever use_conv_bias says
            norm_eps=1e-5,  # fixed in the family, not rms_norm_eps
            time_step_limit=(keys.number("time_step_min", 0.001), math.inf),
        ),
        attention=parts.attention(
            keys,
            head_dim=head_dim,
            in_size=2 * hidden,
            scale=(head_dim / 2) ** -0.5,
            bias=False,
            rotary=parts.rotary(keys, head_dim)
            if keys.flag("use_mem_rope", False)
            else None,
        ),
        mlp=MlpConfig(
            size=keys.whole("intermediate_size", 4 * hidden),
            activation=keys.activation("hidden_act", "gelu"),
            bias=bias,
        ),
        shared=SharedBlockConfig(
            num_blocks=count,
            adapter_rank=keys.whole("adapter_rank", 128),
            attention_adapters=keys.flag("use_shared_attention_adapter", False),
        )
        if uses
        else None,
    )


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}
