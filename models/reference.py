"""A whole sequence in one pass, without cache, chunks or batches: the tests' oracle.

Written to be read against the papers, not to be fast: the scan goes token by token,
attention looks at all pairs, experts run one after the other on every token. It shares
no layer code with the served model, only the configuration and the parameters' names.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.models.config import (
    AttentionConfig,
    Layer,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)

Array = jax.Array
Parameters = Mapping[str, Array]
States = dict[str, Array]


def run_reference(
    config: ModelConfig,
    parameters: Parameters,
    token_ids: Array,
    points: Sequence[int] = (),
) -> tuple[Array, States]:
    """Logits at every position of one sequence, and states after some of them.

    Args:
      config: the model.
      parameters: arrays under the names of `parameters.parameter_shapes`.
      token_ids: i32[T].
      points: token counts in [1, T] at which to report the states.

    Returns:
      f32[T, V] logits, and a dict of states. A layer with recurrence has
      `layers.I.conv` [n, K-1, channels], the last K-1 rows before the convolution and
      before its multipliers, oldest first, and `layers.I.ssm` f32[n, H, P, N], n being
      the number of points; a layer with attention has `layers.I.key` and
      `layers.I.value` [T, kv heads, head dim], rotary positions applied.
    """
    at = jnp.asarray(points, jnp.int32)
    states: States = {}
    embedded = parameters["embed.weight"][token_ids] * config.embedding_multiplier
    hidden = embedded
    for index, layer in enumerate(config.layers):
        own = _within(parameters, f"layers.{index}")
        hidden, found = _layer(config, layer, own, parameters, hidden, embedded, at)
        states |= {f"layers.{index}.{name}": value for name, value in found.items()}
    hidden = _rms_norm(hidden, parameters["final_norm.weight"], config.norm_eps)
    head = "embed.weight" if config.tie_embeddings else "lm_head.weight"
    weights = parameters[head]
    logits = (hidden.astype(weights.dtype) @ weights.T).astype(jnp.float32)
    return logits * config.logits_multiplier, states


def _within(parameters: Parameters, prefix: str) -> Parameters:
    start = f"{prefix}."
    return {
        name.removeprefix(start): value
        for name, value in parameters.items()
        if name.startswith(start)
    }


def _linear(parameters: Parameters, name: str, x: Array) -> Array:
    out = x @ parameters[f"{name}.weight"].T
    bias = parameters.get(f"{name}.bias")
    return out if bias is None else out + bias[None]


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(weight.dtype) * weight[None]


def _layer(
    config: ModelConfig,
    layer: Layer,
    own: Parameters,
    parameters: Parameters,
    hidden: Array,
    embedded: Array,
    points: Array,
) -> tuple[Array, States]:
    states: States = {}
    inner = hidden
    if layer.mixer == "shared":
        shared, states = _shared_block(config, layer, own, parameters, hidden, embedded)
        inner = hidden + shared
    x = _rms_norm(inner, own["norm.weight"], config.norm_eps)
    branch = jnp.zeros_like(x)
    if layer.has_mamba:
        out, found = _mamba(config.mamba, _within(own, "mamba"), x, points)
        branch, states = branch + out * config.mamba.out_multiplier, states | found
    if layer.mixer in ("attention", "parallel"):
        attention = config.attention
        out, found = _attention(
            attention, _within(own, "attention"), x * attention.in_multiplier
        )
        branch, states = branch + out * attention.out_multiplier, states | found
    if layer.mixer != "none":
        hidden = _add(config, hidden, branch)
    if layer.feed_forward == "none":
        return hidden, states
    if layer.mixer != "none":
        x = _rms_norm(hidden, own["ffn_norm.weight"], config.norm_eps)
    if layer.feed_forward == "mlp":
        branch = _mlp(config.mlp, _within(own, "mlp"), x)
    else:
        branch = _moe(config.moe, _within(own, "moe"), x)
    return _add(config, hidden, branch), states


def _add(config: ModelConfig, hidden: Array, branch: Array) -> Array:
    if config.residual_in_float32:
        hidden, branch = hidden.astype(jnp.float32), branch.astype(jnp.float32)
    return hidden + branch * config.residual_multiplier


def _mamba(
    mamba: MambaConfig, own: Parameters, x: Array, points: Array
) -> tuple[Array, States]:
    """The Mamba-2 mixer as a recurrence over tokens, float32 state."""
    projected = x @ own["in_proj.weight"].T
    z, raw, dt = jnp.split(
        projected, [mamba.inner_size, mamba.inner_size + mamba.conv_channels], axis=-1
    )
    # The published projection input is scaled, then its output: both are linear, but
    # the bias sits between them.
    z, xbc, dt = (part * mamba.in_multiplier for part in (z, raw, dt))
    if mamba.in_bias:
        bias = jnp.split(
            own["in_proj.bias"],
            [mamba.inner_size, mamba.inner_size + mamba.conv_channels],
        )
        z, xbc, dt = z + bias[0][None], xbc + bias[1][None], dt + bias[2][None]
    z_by, x_by, b_by, c_by, dt_by = mamba.multipliers
    states_size = mamba.num_groups * mamba.state_size
    column = jnp.concatenate(
        [
            jnp.full((mamba.inner_size,), x_by),
            jnp.full((states_size,), b_by),
            jnp.full((states_size,), c_by),
        ]
    ).astype(x.dtype)
    mixed = jax.nn.silu(_causal_conv(own, xbc * column[None], mamba.conv_width))
    inputs, keys, queries = jnp.split(
        mixed.astype(jnp.float32),
        [mamba.inner_size, mamba.inner_size + states_size],
        axis=-1,
    )
    length = x.shape[0]
    inputs = inputs.reshape(length, mamba.num_heads, mamba.head_dim)
    per_group = mamba.num_heads // mamba.num_groups
    keys, queries = (
        jnp.repeat(part.reshape(length, mamba.num_groups, -1), per_group, axis=1)
        for part in (keys, queries)
    )
    steps = jnp.clip(
        jax.nn.softplus((dt * dt_by).astype(jnp.float32) + own["dt_bias"][None]),
        *mamba.time_step_limit,
    )
    out, after = _recurrence(
        inputs, steps, -jnp.exp(own["A_log"]), keys, queries, own["D"]
    )
    gated = _gated_norm(mamba, own, out.reshape(length, -1), z * z_by)
    padded = jnp.pad(raw, ((mamba.conv_width - 1, 0), (0, 0)))
    window = points[:, None] + jnp.arange(mamba.conv_width - 1)[None]
    states = {"conv": padded[window], "ssm": after[points - 1]}
    return _linear(own, "out_proj", gated.astype(x.dtype)), states


def _causal_conv(own: Parameters, x: Array, width: int) -> Array:
    padded = jnp.pad(x, ((width - 1, 0), (0, 0)))
    weight, length = own["conv.weight"], x.shape[0]
    out = sum(padded[k : k + length] * weight[None, :, k] for k in range(width))
    bias = own.get("conv.bias")
    return out if bias is None else out + bias[None]


def _recurrence(
    x: Array, dt: Array, rates: Array, keys: Array, queries: Array, skip: Array
) -> tuple[Array, Array]:
    """Outputs and states after every token; x [T, H, P], keys and queries [T, H, N]."""

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, tuple]:
        x, dt, key, query = token
        decay = jnp.exp(dt * rates)[:, None, None]
        state = state * decay + (dt[:, None] * x)[:, :, None] * key[:, None, :]
        out = jnp.einsum("hpn,hn->hp", state, query) + skip[:, None] * x
        return state, (out, state)

    start = jnp.zeros((*x.shape[1:], keys.shape[-1]), jnp.float32)
    _, found = lax.scan(step, start, (x, dt, keys, queries))
    return found


def _gated_norm(mamba: MambaConfig, own: Parameters, y: Array, z: Array) -> Array:
    gate = jax.nn.silu(z.astype(jnp.float32))
    if mamba.gate == "gate_only":
        return y * gate
    if mamba.gate == "gate_then_norm":
        y = y * gate
    grouped = y.reshape(y.shape[0], mamba.num_groups, -1)
    mean = jnp.mean(grouped**2, axis=-1, keepdims=True)
    y = (grouped * lax.rsqrt(mean + mamba.norm_eps)).reshape(y.shape)
    y = y * own["norm.weight"].astype(jnp.float32)[None]
    return y * gate if mamba.gate == "norm_then_gate" else y


def _attention(
    attention: AttentionConfig,
    own: Parameters,
    x: Array,
    adapters: Parameters | None = None,
) -> tuple[Array, States]:
    length, dim = x.shape[0], attention.head_dim
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    q, k, v = jnp.split(
        _linear(own, "qkv", x), [heads * dim, (heads + kv_heads) * dim], axis=-1
    )
    if adapters and "q_down.weight" in adapters:
        q, k, v = (
            part + _linear(adapters, f"{name}_up", _linear(adapters, f"{name}_down", x))
            for name, part in (("q", q), ("k", k), ("v", v))
        )
    q = q.reshape(length, heads, dim)
    k = k.reshape(length, kv_heads, dim) * attention.key_multiplier
    v = v.reshape(length, kv_heads, dim)
    if attention.rotary is not None:
        q, k = _rotate(attention, q), _rotate(attention, k)
    wide_k, wide_v = (jnp.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, wide_k).astype(jnp.float32) * attention.scale
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("hqk,khd->qhd", weights.astype(x.dtype), wide_v)
    return _linear(own, "out", out.reshape(length, -1)), {"key": k, "value": v}


def _rotate(attention: AttentionConfig, x: Array) -> Array:
    """Rotary positions 0, 1, ... on the first `rotary.dim` entries of every head."""
    rotary = attention.rotary
    exponents = jnp.arange(0, rotary.dim, 2, dtype=jnp.float32) / rotary.dim
    positions = jnp.arange(x.shape[0], dtype=jnp.float32) / rotary.scaling_factor
    angles = positions[:, None] * (1.0 / rotary.theta**exponents)[None]
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second, rest = jnp.split(x, [rotary.dim // 2, rotary.dim], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest], axis=-1)


def _activation(name: str, x: Array) -> Array:
    if name == "relu2":
        return jax.nn.relu(x) ** 2
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(x, approximate=name == "gelu_tanh")
    return {"silu": jax.nn.silu, "relu": jax.nn.relu}[name](x)


def _mlp(
    mlp: MlpConfig, own: Parameters, x: Array, adapters: Parameters | None = None
) -> Array:
    up = _linear(own, "up", x)
    if adapters is not None:
        up = up + _linear(adapters, "mlp_up", _linear(adapters, "mlp_down", x))
    return _linear(own, "down", _inner(mlp, up)) * mlp.down_multiplier


def _inner(mlp: MlpConfig, up: Array) -> Array:
    if not mlp.gated:
        return _activation(mlp.activation, up)
    gate, up = jnp.split(up, 2, axis=-1)
    return _activation(mlp.activation, gate * mlp.gate_multiplier) * up


def _moe(moe: MoeConfig, own: Parameters, x: Array) -> Array:
    chosen = _route(moe, own, x)  # f32[T, E], 0 where a token does not go
    inner = _linear(own, "latent_in", x) if moe.latent_size else x
    out = jnp.zeros(inner.shape, jnp.float32)
    for expert in range(moe.num_experts):
        up = _inner(moe.expert, inner @ own["experts.up"][expert].T)
        down = up @ own["experts.down"][expert].T
        out = out + down.astype(jnp.float32) * chosen[:, expert, None]
    out = out.astype(x.dtype)
    if moe.latent_size:
        out = _linear(own, "latent_out", out)
    return out + _mlp(moe.shared, _within(own, "shared"), x) if moe.shared else out


def _route(moe: MoeConfig, own: Parameters, x: Array) -> Array:
    logits = x.astype(jnp.float32) @ own["router.weight"].astype(jnp.float32).T
    tokens = jnp.arange(x.shape[0])[:, None]
    nothing = jnp.zeros_like(logits)
    if moe.router == "softmax_of_top_k":
        best, index = lax.top_k(logits, moe.top_k)
        return nothing.at[tokens, index].set(jax.nn.softmax(best, axis=-1))
    scores = jax.nn.sigmoid(logits)
    wish = scores + own["router.bias"][None]
    grouped = wish.reshape(x.shape[0], moe.num_groups, -1)
    value = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    groups = lax.top_k(value, moe.top_groups)[1]
    open_groups = jnp.zeros(value.shape, bool).at[tokens, groups].set(True)
    wish = jnp.where(open_groups[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    index = lax.top_k(wish, moe.top_k)[1]
    weights = jnp.take_along_axis(scores, index, axis=-1)
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return nothing.at[tokens, index].set(weights * moe.scaling)


def _shared_block(
    config: ModelConfig,
    layer: Layer,
    own: Parameters,
    parameters: Parameters,
    hidden: Array,
    embedded: Array,
) -> tuple[Array, States]:
    block = _within(parameters, f"shared.{layer.shared_block}")
    adapters = _within(own, "adapters")
    x = jnp.concatenate([hidden, embedded], axis=-1)
    x = _rms_norm(x, block["norm.weight"], config.norm_eps)
    x, states = _attention(config.attention, _within(block, "attention"), x, adapters)
    x = _rms_norm(x, block["ffn_norm.weight"], config.norm_eps)
    x = _mlp(config.mlp, _within(block, "mlp"), x, adapters)
    return _linear(own, "linear", x), states
