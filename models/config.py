"""`ModelConfig`: one frozen description of a hybrid model, whatever its family.

A model is a row of layers, each a `Layer`: what mixes tokens (`mixer`) and what follows
it (`feed_forward`). Every family is written in these terms once, in `families`; nothing
downstream asks which family a model belongs to.

Shape letters of the whole folder: T tokens, V vocabulary, D hidden size, H heads,
P head dim, N state dim, G groups, K convolution width, Q scan chunk, C cells, R rows,
S state slots, E experts, F inner size of a feed-forward.
"""

import dataclasses
import math

MIXERS = ("mamba", "attention", "parallel", "shared", "none")
FEED_FORWARDS = ("none", "mlp", "moe")
GATES = ("gate_then_norm", "norm_then_gate", "gate_only")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
ROUTERS = ("softmax_of_top_k", "sigmoid_groups")


def _require(holds: bool, field: str, value: object, right: str) -> None:
    if not holds:
        raise ValueError(f"{field} must be {right}, got {value!r}")


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        where = f"{type(config).__name__}.{name}"
        _require(whole and value > 0, where, value, "a whole number > 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: `x + mixer(norm(x))`, then `x + feed_forward(norm(x))`.

    `parallel` runs a Mamba-2 mixer and attention on the same input and adds them;
    `shared` feeds a shared transformer block's output into a Mamba-2 mixer.
    """

    mixer: str = "mamba"
    feed_forward: str = "none"
    shared_block: int = -1  # which shared transformer block; only where mixer="shared"

    def __post_init__(self):
        _require(self.mixer in MIXERS, "Layer.mixer", self.mixer, f"one of {MIXERS}")
        _require(
            self.feed_forward in FEED_FORWARDS,
            "Layer.feed_forward",
            self.feed_forward,
            f"one of {FEED_FORWARDS}",
        )
        shared = self.mixer == "shared"
        _require(
            (self.shared_block >= 0) == shared,
            "Layer.shared_block",
            self.shared_block,
            "a block index exactly where mixer is 'shared'",
        )

    @property
    def has_mamba(self) -> bool:
        """Whether the layer keeps a recurrent state."""
        return self.mixer in ("mamba", "parallel", "shared")

    @property
    def has_attention(self) -> bool:
        """Whether the layer keeps keys and values."""
        return self.mixer in ("attention", "parallel", "shared")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """The Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060).

    `time_step_limit` clamps softplus(dt + bias) alike in prefill and in decoding.
    (transformers clamps in prefill only, so its own two paths differ where it binds.)
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    chunk_size: int  # Q, the scan grid; the published value, which is free to change
    in_bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    gate: str = "gate_then_norm"
    norm_eps: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    in_multiplier: float = 1.0
    multipliers: tuple[float, ...] = (1.0,) * 5  # on z, x, B, C, dt
    out_multiplier: float = 1.0

    def __post_init__(self):
        _require_positive(self, "num_heads", "head_dim", "state_size", "num_groups")
        _require_positive(self, "chunk_size")
        wide = isinstance(self.conv_width, int) and self.conv_width >= 2
        _require(wide, "MambaConfig.conv_width", self.conv_width, "at least 2")
        _require(
            self.num_heads % self.num_groups == 0,
            "MambaConfig.num_groups",
            self.num_groups,
            f"a divisor of num_heads={self.num_heads}",
        )
        _require(self.gate in GATES, "MambaConfig.gate", self.gate, f"one of {GATES}")
        low, high = self.time_step_limit
        _require(
            0 <= low <= high,
            "MambaConfig.time_step_limit",
            self.time_step_limit,
            "a pair 0 <= low <= high",
        )
        _require(
            len(self.multipliers) == 5,
            "MambaConfig.multipliers",
            self.multipliers,
            "five numbers, for z, x, B, C and dt",
        )

    @property
    def inner_size(self) -> int:
        """Channels of x and of the gate z: heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution sees: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def raw_size(self) -> int:
        """Columns of the input projection that a tail carries: x, B, C and dt."""
        return self.conv_channels + self.num_heads

    @property
    def projection_size(self) -> int:
        """Columns of the input projection: z, x, B, C and dt."""
        return self.inner_size + self.raw_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary positions on the first `dim` entries of a head, halves rotated."""

    dim: int
    theta: float = 10000.0
    scaling_factor: float = 1.0  # "linear" scaling: positions are divided by it

    def __post_init__(self):
        even = isinstance(self.dim, int) and self.dim > 0 and self.dim % 2 == 0
        _require(even, "RotaryConfig.dim", self.dim, "even and > 0")
        _require(self.theta > 0, "RotaryConfig.theta", self.theta, "> 0")
        factor = self.scaling_factor
        _require(factor > 0, "RotaryConfig.scaling_factor", factor, "> 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention; `rotary=None` means no positions at all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    in_size: int
    scale: float
    bias: bool = False
    rotary: RotaryConfig | None = None
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0

    def __post_init__(self):
        _require_positive(self, "num_heads", "num_kv_heads", "head_dim", "in_size")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "AttentionConfig.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        if self.rotary is not None:
            _require(
                self.rotary.dim <= self.head_dim,
                "RotaryConfig.dim",
                self.rotary.dim,
                f"at most head_dim={self.head_dim}",
            )

    @property
    def projection_size(self) -> int:
        """Columns of the joint query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """A feed-forward: `down(act(gate) * up)` where gated, else `down(act(up))`."""

    size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def __post_init__(self):
        _require_positive(self, "size")
        _require(
            self.activation in ACTIVATIONS,
            "MlpConfig.activation",
            self.activation,
            f"one of {ACTIVATIONS}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed experts, plus one expert that every token takes where `shared` is set.

    `softmax_of_top_k` weighs the chosen experts by a softmax over their own logits.
    `sigmoid_groups` chooses by sigmoid score plus a learned bias, first the best
    `top_groups` of `num_groups` groups (by the sum of their two best), then experts in
    them; the weights are the scores without the bias (DeepSeek-V3, arXiv:2412.19437).
    """

    num_experts: int
    top_k: int
    expert: MlpConfig
    shared: MlpConfig | None = None
    router: str = "softmax_of_top_k"
    latent_size: int = 0  # 0: experts read the hidden state itself
    latent_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    scaling: float = 1.0

    def __post_init__(self):
        _require_positive(self, "num_experts", "top_k", "num_groups", "top_groups")
        _require(
            self.router in ROUTERS, "MoeConfig.router", self.router, f"in {ROUTERS}"
        )
        _require(
            self.num_experts % self.num_groups == 0,
            "MoeConfig.num_groups",
            self.num_groups,
            f"a divisor of num_experts={self.num_experts}",
        )
        _require(
            self.top_groups <= self.num_groups,
            "MoeConfig.top_groups",
            self.top_groups,
            f"at most num_groups={self.num_groups}",
        )
        reachable = self.num_experts // self.num_groups * self.top_groups
        _require(
            self.top_k <= reachable,
            "MoeConfig.top_k",
            self.top_k,
            f"at most the {reachable} experts that a token can reach",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBlockConfig:
    """Transformer blocks used by several layers, each use with its own adapters."""

    num_blocks: int
    adapter_rank: int
    attention_adapters: bool

    def __post_init__(self):
        _require_positive(self, "num_blocks", "adapter_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. Hashable, so that it can be a static argument of a jitted step."""

    family: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    layers: tuple[Layer, ...]
    mamba: MambaConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    moe: MoeConfig | None = None
    shared: SharedBlockConfig | None = None
    tie_embeddings: bool = False
    residual_in_float32: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0

    def __post_init__(self):
        _require_positive(self, "vocab_size", "hidden_size")
        _require(len(self.layers) > 0, "ModelConfig.layers", self.layers, "not empty")
        needs = {
            "mamba": any(layer.has_mamba for layer in self.layers),
            "attention": any(layer.has_attention for layer in self.layers),
            "mlp": any(layer.feed_forward == "mlp" for layer in self.layers),
            "moe": any(layer.feed_forward == "moe" for layer in self.layers),
            "shared": any(layer.mixer == "shared" for layer in self.layers),
        }
        for name, needed in needs.items():
            given = getattr(self, name) is not None
            where = f"ModelConfig.{name}"
            _require(given or not needed, where, None, "given: a layer uses it")

    @property
    def num_layers(self) -> int:
        """Layers of any kind."""
        return len(self.layers)

    @property
    def mamba_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a recurrent state, in order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.has_mamba)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values, in order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.has_attention)
