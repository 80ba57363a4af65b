"""What one layer of a model stores: keys and values, a recurrent state, weights.

Counts are elements, not bytes. Norms are left out of the weights (a few thousandths).
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Stored elements of one layer, or of one part of a layer.

    Attributes:
      kind: for people: `attention`, `mamba2`, `mlp`, ...
      num_kv_heads: heads that store keys and values; 0: the layer stores none.
      kv_elements: elements stored for one token.
      kv_is_shared: every tensor-parallel rank stores all of them (latent attention).
      num_state_heads: heads of the recurrent state; 0: the layer has none.
      state_elements: elements of the recurrent state itself.
      conv_channels: channels of the short convolution in front of it.
      conv_elements: its last inputs that are kept.
      num_params: weights.
    """

    kind: str
    num_kv_heads: int = 0
    kv_elements: int = 0
    kv_is_shared: bool = False
    num_state_heads: int = 0
    state_elements: int = 0
    conv_channels: int = 0
    conv_elements: int = 0
    num_params: int = 0

    @property
    def has_state(self) -> bool:
        """Whether anything of it is part of a snapshot."""
        return self.state_elements + self.conv_elements > 0


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    output_gate: bool = False,
    input_width: int | None = None,
) -> LayerShape:
    """Grouped-query attention; `input_width` where it reads more than the output."""
    wide = hidden if input_width is None else input_width
    queries = heads * head_dim * (2 if output_gate else 1)
    weights = wide * (queries + 2 * kv_heads * head_dim) + heads * head_dim * hidden
    return LayerShape(
        kind="attention",
        num_kv_heads=kv_heads,
        kv_elements=2 * kv_heads * head_dim,
        num_params=weights,
    )


def latent_attention(
    hidden: int, heads: int, rank: int, rope: int, nope: int, value: int
) -> LayerShape:
    """Multi-head latent attention: one compressed vector a token, shared by heads."""
    weights = hidden * heads * (nope + rope) + hidden * (rank + rope)
    weights += rank * heads * (nope + value) + heads * value * hidden
    return LayerShape(
        kind="latent_attention",
        num_kv_heads=1,
        kv_elements=rank + rope,
        kv_is_shared=True,
        num_params=weights,
    )


def mamba2(
    hidden: int, heads: int, head_dim: int, state: int, groups: int, conv: int
) -> LayerShape:
    """Mamba-2: state [heads, head_dim, state], convolution over x, B and C."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    weights = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return LayerShape(
        kind="mamba2",
        num_state_heads=heads,
        state_elements=heads * head_dim * state,
        conv_channels=channels,
        conv_elements=channels * (conv - 1),
        num_params=weights + channels * conv,
    )


def mamba1(hidden: int, inner: int, state: int, dt_rank: int, conv: int) -> LayerShape:
    """Mamba-1: every channel is its own head."""
    weights = 2 * hidden * inner + inner * (dt_rank + 2 * state) + dt_rank * inner
    weights += inner * state + inner * conv + inner * hidden
    return LayerShape(
        kind="mamba1",
        num_state_heads=inner,
        state_elements=inner * state,
        conv_channels=inner,
        conv_elements=inner * (conv - 1),
        num_params=weights,
    )


def gated_delta_net(
    hidden: int, key_heads: int, value_heads: int, key: int, value: int, conv: int
) -> LayerShape:
    """Gated delta net: state [value heads, key, value], convolution over q, k and v."""
    keys, values = key_heads * key, value_heads * value
    channels = 2 * keys + values
    weights = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return LayerShape(
        kind="gated_delta_net",
        num_state_heads=value_heads,
        state_elements=value_heads * key * value,
        conv_channels=channels,
        conv_elements=channels * (conv - 1),
        num_params=weights + channels * conv,
    )


def kimi_delta_attention(
    hidden: int, heads: int, key: int, value: int, conv: int
) -> LayerShape:
    """Kimi delta attention: low-rank decay and output gates beside q, k and v."""
    keys, values = heads * key, heads * value
    channels = 2 * keys + values
    weights = hidden * (2 * keys + values) + values * hidden + hidden * heads
    weights += hidden * key + key * keys + hidden * value + value * values
    return LayerShape(
        kind="kimi_delta_attention",
        num_state_heads=heads,
        state_elements=heads * key * value,
        conv_channels=channels,
        conv_elements=channels * (conv - 1),
        num_params=weights + channels * conv,
    )


def short_convolution(hidden: int, conv: int) -> LayerShape:
    """A gated short convolution: no state but its last inputs."""
    return LayerShape(
        kind="short_convolution",
        num_state_heads=hidden,
        conv_channels=hidden,
        conv_elements=hidden * (conv - 1),
        num_params=4 * hidden * hidden + hidden * conv,
    )


def mlp(hidden: int, inner: int, gated: bool) -> LayerShape:
    """A dense feed-forward layer."""
    weights = hidden * inner * (3 if gated else 2)
    return LayerShape(kind="mlp", num_params=weights)


def mixture_of_experts(
    hidden: int,
    experts: int,
    inner: int,
    gated: bool,
    *,
    shared_inner: int = 0,
    shared_gate: bool = False,
    latent: int = 0,
) -> LayerShape:
    """Routed experts, on a latent width where there is one, and a shared expert."""
    factor = 3 if gated else 2
    weights = experts * (latent or hidden) * inner * factor + experts * hidden
    weights += hidden * shared_inner * factor + 2 * hidden * latent
    weights += hidden if shared_gate else 0
    return LayerShape(kind="mixture_of_experts", num_params=weights)
