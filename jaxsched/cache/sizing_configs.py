"""Layers of a model from its Hugging Face `config.json`.

One reader for each family; every reader asks for exactly the keys that it needs and
says which one is missing. Both the old and the new names of layer lists are read.
"""

from collections.abc import Mapping

from jaxsched.cache import sizing_layers as layers
from jaxsched.cache.sizing_layers import LayerShape

_ATTENTION = frozenset(("attention", "full_attention", "*", "hybrid"))
_RECURRENT = frozenset(("mamba", "linear_attention", "M", "conv"))


class _Config:
    """Reads keys of a config and complains by name."""

    def __init__(self, config: Mapping[str, object]):
        self.config = config

    def __contains__(self, key: str) -> bool:
        return self.config.get(key) is not None

    def count(self, *keys: str, default: int | None = None, low: int = 1) -> int:
        """The first of some keys that is there, as an integer >= low."""
        for key in keys:
            if key in self:
                value = self.config[key]
                if isinstance(value, bool) or not isinstance(value, int) or value < low:
                    raise ValueError(
                        f"{key} must be an integer >= {low}, got {value!r}"
                    )
                return value
        if default is None:
            raise ValueError(f"{' or '.join(keys)} is missing")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
        return value

    def names(self, *keys: str) -> list[str] | None:
        """The first of some lists of layer names that is there."""
        for key in keys:
            if key in self:
                value = self.config[key]
                if isinstance(value, str):
                    value = list(value)
                if not isinstance(value, list) or not all(
                    isinstance(name, str) for name in value
                ):
                    raise ValueError(f"{key} must be a list of names, got {value!r}")
                return value
        return None

    @property
    def num_layers(self) -> int:
        return self.count("num_hidden_layers")

    @property
    def hidden(self) -> int:
        return self.count("hidden_size")

    def layer_names(self, *keys: str) -> list[str]:
        """A list of layer names whose length has been checked."""
        found = self.names(*keys)
        if found is None:
            raise ValueError(f"{' or '.join(keys)} is missing")
        if "num_hidden_layers" in self and len(found) != self.num_layers:
            raise ValueError(
                f"num_hidden_layers={self.num_layers} does not fit the {len(found)} "
                f"entries of {' or '.join(keys)}"
            )
        return found


def layers_of_config(
    config: object,
) -> tuple[tuple[LayerShape, ...], int, int, bool, int]:
    """Layers, vocabulary, width, whether embeddings are tied, context length.

    Raises:
      ValueError: naming the key that is missing, of the wrong kind, or not known.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a config must be a JSON object, got {type(config).__name__}")
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"model_type {family!r} is not known; known are "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    read = _Config(config)
    shapes = tuple(_FAMILIES[family](read))
    tied = read.flag("tie_word_embeddings", family in _TIED)
    context = read.count("max_position_embeddings", "model_max_length", default=0)
    return shapes, read.count("vocab_size"), read.hidden, tied, context


def _attention(read: _Config, **more) -> LayerShape:
    heads = read.count("num_attention_heads")
    head_dim = read.count("head_dim", "attention_head_dim", default=0, low=0)
    return layers.attention(
        read.hidden,
        heads,
        read.count("num_key_value_heads", default=heads),
        head_dim or read.hidden // heads,
        **more,
    )


def _mlp(read: _Config, gated: bool = True) -> LayerShape:
    return layers.mlp(read.hidden, read.count("intermediate_size"), gated)


def _prefixed_mamba2(read: _Config) -> LayerShape:
    """Mamba-2 as Bamba, Granite and Falcon-H1 spell it."""
    inner = read.count("mamba_d_ssm", default=0) or (
        read.count("mamba_expand", default=2) * read.hidden
    )
    heads = read.count("mamba_n_heads")
    return layers.mamba2(
        read.hidden,
        heads,
        inner // heads,
        read.count("mamba_d_state"),
        read.count("mamba_n_groups", default=1),
        read.count("mamba_d_conv", default=4),
    )


def _bamba(read: _Config):
    names = read.names("layer_types", "layers_block_type")
    places = read.config.get("attn_layer_indices") or []
    if names is None:
        names = [
            "attention" if at in places else "mamba" for at in range(read.num_layers)
        ]
    for name in names:
        yield _attention(read) if name in _ATTENTION else _prefixed_mamba2(read)
        yield _mlp(read)


def _granite(read: _Config):
    experts = read.count("num_local_experts", default=0, low=0)
    shared = read.count("shared_intermediate_size", default=0, low=0)
    for name in read.layer_names("layer_types", "layers_block_type"):
        yield _attention(read) if name in _ATTENTION else _prefixed_mamba2(read)
        if experts:
            yield layers.mixture_of_experts(
                read.hidden,
                experts,
                read.count("intermediate_size"),
                True,
                shared_inner=shared,
            )
        else:
            yield layers.mlp(read.hidden, shared, True)


def _falcon_h1(read: _Config):
    for _ in range(read.num_layers):
        yield _attention(read)
        yield _prefixed_mamba2(read)
        yield _mlp(read)


def _nemotron_h(read: _Config):
    for name in read.layer_names("layers_block_type", "hybrid_override_pattern"):
        if name in _ATTENTION:
            yield _attention(read)
        elif name in _RECURRENT:
            yield layers.mamba2(
                read.hidden,
                read.count("mamba_num_heads"),
                read.count("mamba_head_dim"),
                read.count("ssm_state_size"),
                read.count("n_groups", default=1),
                read.count("conv_kernel", default=4),
            )
        elif name in ("mlp", "-"):
            yield _mlp(read, gated=False)
        elif name in ("moe", "E"):
            yield layers.mixture_of_experts(
                read.hidden,
                read.count("n_routed_experts"),
                read.count("moe_intermediate_size"),
                False,
                shared_inner=read.count(
                    "moe_shared_expert_intermediate_size", default=0
                )
                * read.count("n_shared_experts", default=1),
                latent=read.count("moe_latent_size", default=0),
            )
        else:
            raise ValueError(f"layers_block_type has an unknown entry {name!r}")


def _zamba2(read: _Config):
    heads = read.count("num_attention_heads")
    wide = read.count("attention_hidden_size", default=2 * read.hidden)
    for name in read.layer_names("layers_block_type", "layer_types"):
        yield layers.mamba2(
            read.hidden,
            read.count("n_mamba_heads"),
            read.count("mamba_headdim"),
            read.count("mamba_d_state"),
            read.count("mamba_ngroups", default=1),
            read.count("mamba_d_conv", default=4),
        )
        if name == "hybrid":
            head_dim = read.count("attention_head_dim", default=wide // heads)
            kv_heads = read.count("num_key_value_heads", default=heads)
            yield layers.attention(
                read.hidden, heads, kv_heads, head_dim, input_width=wide
            )
            yield _mlp(read)


def _mamba2(read: _Config):
    for _ in range(read.num_layers):
        yield layers.mamba2(
            read.hidden,
            read.count("num_heads"),
            read.count("head_dim"),
            read.count("state_size"),
            read.count("n_groups", default=1),
            read.count("conv_kernel", default=4),
        )


def _mamba1(read: _Config):
    expand = read.count("expand", default=2)
    inner = read.count("intermediate_size", default=expand * read.hidden)
    for _ in range(read.num_layers):
        yield layers.mamba1(
            read.hidden,
            inner,
            read.count("state_size"),
            read.count("time_step_rank", default=-(-read.hidden // 16)),
            read.count("conv_kernel", default=4),
        )


def _jamba(read: _Config):
    places = (read.count("attn_layer_offset", low=0), read.count("attn_layer_period"))
    sparse = (
        read.count("expert_layer_offset", low=0),
        read.count("expert_layer_period"),
    )
    for at in range(read.num_layers):
        if at % places[1] == places[0]:
            yield _attention(read)
        else:
            yield layers.mamba1(
                read.hidden,
                read.count("mamba_expand", default=2) * read.hidden,
                read.count("mamba_d_state"),
                read.count("mamba_dt_rank", default=-(-read.hidden // 16)),
                read.count("mamba_d_conv", default=4),
            )
        if at % sparse[1] == sparse[0] and read.count("num_experts", default=1) > 1:
            yield layers.mixture_of_experts(
                read.hidden,
                read.count("num_experts"),
                read.count("intermediate_size"),
                True,
            )
        else:
            yield _mlp(read)


def _delta_layer(read: _Config) -> LayerShape:
    return layers.gated_delta_net(
        read.hidden,
        read.count("linear_num_key_heads"),
        read.count("linear_num_value_heads"),
        read.count("linear_key_head_dim"),
        read.count("linear_value_head_dim"),
        read.count("linear_conv_kernel_dim", default=4),
    )


def _delta_names(read: _Config) -> list[str]:
    if "layer_types" in read:
        return read.layer_names("layer_types")
    every = read.count("full_attention_interval", default=4)
    return [
        "linear_attention" if (at + 1) % every else "full_attention"
        for at in range(read.num_layers)
    ]


def _qwen(read: _Config):
    dense = read.config.get("mlp_only_layers") or []
    every = read.count("decoder_sparse_step", default=1)
    for at, name in enumerate(_delta_names(read)):
        full = name in _ATTENTION
        yield _attention(read, output_gate=True) if full else _delta_layer(read)
        experts = read.count("num_experts", default=0, low=0)
        if experts and at not in dense and (at + 1) % every == 0:
            yield layers.mixture_of_experts(
                read.hidden,
                experts,
                read.count("moe_intermediate_size"),
                True,
                shared_inner=read.count("shared_expert_intermediate_size", default=0),
                shared_gate=True,
            )
        else:
            yield _mlp(read)


def _olmo_hybrid(read: _Config):
    for name in _delta_names(read):
        yield _attention(read) if name in _ATTENTION else _delta_layer(read)
        yield _mlp(read)


def _kimi_linear(read: _Config):
    kinds = read.names("mlp_layer_types")
    first = read.count("first_k_dense_replace", default=1, low=0)
    inner = read.config.get("linear_attn_config")
    linear = _Config(inner) if isinstance(inner, Mapping) else read
    places = linear.config.get("full_attn_layers") or []
    names = read.names("layer_types") or [
        "full_attention" if at + 1 in places else "linear_attention"
        for at in range(read.num_layers)
    ]
    for at, name in enumerate(names):
        if name in _ATTENTION:
            yield layers.latent_attention(
                read.hidden,
                read.count("num_attention_heads"),
                read.count("kv_lora_rank"),
                read.count("qk_rope_head_dim"),
                read.count("qk_nope_head_dim"),
                read.count("v_head_dim"),
            )
        else:
            dim = linear.count("linear_head_dim", "head_dim")
            yield layers.kimi_delta_attention(
                read.hidden,
                linear.count("linear_num_heads", "num_heads"),
                dim,
                dim,
                linear.count("linear_conv_kernel_dim", "short_conv_kernel_size"),
            )
        sparse = kinds[at] == "sparse" if kinds else at >= first
        if sparse:
            width = read.count("moe_intermediate_size")
            yield layers.mixture_of_experts(
                read.hidden,
                read.count("num_experts"),
                width,
                True,
                shared_inner=width * read.count("num_shared_experts", default=1),
            )
        else:
            yield _mlp(read)


def _lfm2(read: _Config):
    for name in read.layer_names("layer_types"):
        if name in _ATTENTION:
            yield _attention(read)
        else:
            yield layers.short_convolution(read.hidden, read.count("conv_L_cache"))
        yield _mlp(read)


_FAMILIES = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba1,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "mamba": _mamba1,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_text": _qwen,
    "qwen3_next": _qwen,
    "zamba2": _zamba2,
}
_TIED = frozenset(("mamba", "mamba2", "falcon_mamba", "zamba2", "lfm2"))
