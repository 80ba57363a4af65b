"""The parameters of a model: their names, shapes, and names in a published checkpoint.

A parameter's name here is its path in `HybridModel` (`layers.0.mamba.conv.weight`).
Matrices keep the published layout [out, in]. Projections that read the same input are
stored as one matrix: query, key and value; gate and up; so each is one product.
"""

from collections.abc import Iterator

from jaxsched.models.config import (
    AttentionConfig,
    Layer,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)

Shapes = dict[str, tuple[int, ...]]

# Read and kept in float32 whatever the checkpoint holds: they enter exponentials.
FLOAT32_ENDINGS = (".A_log", ".dt_bias", ".D", ".router.bias")


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Every parameter of the model with its shape, in a fixed order."""
    size, vocabulary = config.hidden_size, config.vocab_size
    shapes: Shapes = {"embed.weight": (vocabulary, size)}
    for index in range(config.shared.num_blocks if config.shared else 0):
        shapes |= _under(f"shared.{index}", _shared_block(config))
    for index, layer in enumerate(config.layers):
        shapes |= _under(f"layers.{index}", _layer(config, layer))
    shapes["final_norm.weight"] = (size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocabulary, size)
    return shapes


def is_float32(name: str) -> bool:
    """Whether a parameter is held in float32 in a model of any dtype."""
    return name.endswith(FLOAT32_ENDINGS)


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _layer(config: ModelConfig, layer: Layer) -> Shapes:
    size = config.hidden_size
    shapes: Shapes = {"norm.weight": (size,)}
    if layer.mixer == "shared":
        shapes["linear.weight"] = (size, size)
        shapes |= _under("adapters", adapter_shapes(config))
    if layer.has_mamba:
        shapes |= _under("mamba", mamba_shapes(config.mamba, size))
    if layer.mixer in ("attention", "parallel"):
        shapes |= _under("attention", attention_shapes(config.attention, size))
    if layer.mixer != "none" and layer.feed_forward != "none":
        shapes["ffn_norm.weight"] = (size,)
    if layer.feed_forward == "mlp":
        shapes |= _under("mlp", mlp_shapes(config.mlp, size))
    if layer.feed_forward == "moe":
        shapes |= _under("moe", moe_shapes(config.moe, size))
    return shapes


def _shared_block(config: ModelConfig) -> Shapes:
    size = config.hidden_size
    return {
        "norm.weight": (config.attention.in_size,),
        **_under("attention", attention_shapes(config.attention, size)),
        "ffn_norm.weight": (size,),
        **_under("mlp", mlp_shapes(config.mlp, size)),
    }


def adapter_shapes(config: ModelConfig) -> Shapes:
    """Adapters of one use of a shared block."""
    rank, attention = config.shared.adapter_rank, config.attention
    shapes: Shapes = {}
    if config.shared.attention_adapters:
        for name, heads in (
            ("q", attention.num_heads),
            ("k", attention.num_kv_heads),
            ("v", attention.num_kv_heads),
        ):
            shapes[f"{name}_down.weight"] = (rank, attention.in_size)
            shapes[f"{name}_up.weight"] = (heads * attention.head_dim, rank)
    shapes["mlp_down.weight"] = (rank, config.hidden_size)
    shapes["mlp_up.weight"] = (2 * config.mlp.size, rank)
    return shapes


def _linear(name: str, shape: tuple[int, ...], bias: bool) -> Shapes:
    shapes = {f"{name}.weight": shape}
    return {**shapes, f"{name}.bias": shape[:-1]} if bias else shapes


def mamba_shapes(mamba: MambaConfig, size: int) -> Shapes:
    """Parameters of one Mamba-2 mixer."""
    heads, channels = mamba.num_heads, mamba.conv_channels
    shapes = _linear("in_proj", (mamba.projection_size, size), mamba.in_bias)
    shapes["conv.weight"] = (channels, mamba.conv_width)
    if mamba.conv_bias:
        shapes["conv.bias"] = (channels,)
    shapes |= {"dt_bias": (heads,), "A_log": (heads,), "D": (heads,)}
    if mamba.gate != "gate_only":
        shapes["norm.weight"] = (mamba.inner_size,)
    return shapes | _linear("out_proj", (size, mamba.inner_size), mamba.out_bias)


def attention_shapes(attention: AttentionConfig, size: int) -> Shapes:
    """Parameters of one attention mixer."""
    wide = attention.num_heads * attention.head_dim
    return {
        **_linear(
            "qkv", (attention.projection_size, attention.in_size), attention.bias
        ),
        **_linear("out", (size, wide), attention.bias),
    }


def mlp_shapes(mlp: MlpConfig, size: int) -> Shapes:
    """Parameters of one dense feed-forward; `up` holds gate and up where gated."""
    rows = 2 * mlp.size if mlp.gated else mlp.size
    return {
        **_linear("up", (rows, size), mlp.bias),
        **_linear("down", (size, mlp.size), mlp.bias),
    }


def moe_shapes(moe: MoeConfig, size: int) -> Shapes:
    """Parameters of one mixture of experts."""
    inner = moe.latent_size or size
    rows = 2 * moe.expert.size if moe.expert.gated else moe.expert.size
    shapes: Shapes = {"router.weight": (moe.num_experts, size)}
    if moe.router == "sigmoid_groups":
        shapes["router.bias"] = (moe.num_experts,)
    shapes["experts.up"] = (moe.num_experts, rows, inner)
    shapes["experts.down"] = (moe.num_experts, inner, moe.expert.size)
    if moe.latent_size:
        shapes |= _linear("latent_in", (inner, size), moe.latent_bias)
        shapes |= _linear("latent_out", (size, inner), moe.latent_bias)
    if moe.shared is not None:
        shapes |= _under("shared", mlp_shapes(moe.shared, size))
    return shapes


def count_parameters(config: ModelConfig) -> int:
    """How many numbers the model's parameters hold."""
    return sum(_product(shape) for shape in parameter_shapes(config).values())


def _product(shape: Iterator[int] | tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
