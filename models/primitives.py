"""Norms, activations, products: the small functions every layer is made of.

All of them act on the last axis and on each row alone.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def matmul(x: Array, weight: Array) -> Array:
    """`x @ weight.T`, the raw product, in the dtype of the weight; [..., in] -> out.

    A row's bits depend on how many rows the product has, not on what the others hold:
    callers keep the number of rows fixed.
    """
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(weight.dtype), weight, dims)


def float32_einsum(spec: str, *operands: Array) -> Array:
    """An einsum with float32 result; low-precision inputs are multiplied as they are.

    XLA's CPU backend has no batched bfloat16 products with float32 results, so they
    are widened there, which changes no value.
    """
    if jax.default_backend() == "cpu":
        operands = tuple(operand.astype(jnp.float32) for operand in operands)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def along_last(vector: Array, like: Array) -> Array:
    """A vector with leading axes of size 1, to combine with an array of more axes."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm in float32, scaled in the weight's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    unit = (wide * lax.rsqrt(mean + eps)).astype(weight.dtype)
    return unit * along_last(weight, unit)


def gated_norm(
    y: Array, z: Array, weight: Array | None, *, gate: str, groups: int, eps: float
) -> Array:
    """The norm behind the scan, one mean a group of channels; all in float32.

    Args:
      y: f32[..., inner], what the scan gave.
      z: [..., inner], the gate before silu.
      weight: [inner]; not read where `gate` is "gate_only".
      gate: one of `config.GATES`.
      groups: divides inner.
      eps: added to the mean square.
    """
    gate_values = jax.nn.silu(z.astype(jnp.float32))
    if gate == "gate_only":
        return y * gate_values
    if gate == "gate_then_norm":
        y = y * gate_values
    grouped = y.reshape(*y.shape[:-1], groups, -1)
    mean = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
    y = (grouped * lax.rsqrt(mean + eps)).reshape(y.shape)
    y = y * along_last(weight.astype(jnp.float32), y)
    return y * gate_values if gate == "norm_then_gate" else y


def activation(name: str, x: Array) -> Array:
    """One of `config.ACTIVATIONS`, elementwise."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    if name == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def rotate(x: Array, positions: Array, dim: int, theta: float, scaling: float) -> Array:
    """Rotary positions (Su et al., arXiv:2104.09864), half against half.

    Args:
      x: [..., heads, head_dim].
      positions: i32[...], one a token.
      dim: leading entries of a head that turn; the others pass.
      theta: base of the frequencies.
      scaling: positions are divided by it.
    """
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    places = positions.astype(jnp.float32)[..., None, None] / scaling
    angles = places * along_last(1.0 / theta**exponents, places)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, x[..., dim:]], axis=-1)
