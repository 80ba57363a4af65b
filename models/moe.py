"""Mixture-of-experts routing and products that do not depend on the batch mix.

No capacity, no dropped tokens: a token's output is a function of the token alone. Two
forms, chosen by `MoeForm`; each gives the same bits for a token in any batch of its
fixed size, but not the same bits as the other form:

* `dense`: every expert runs on every token, weights 0 where a token does not go. Costs
  experts / top_k times the products: for few experts, and for small models.
* `ragged`: tokens sorted by expert, one ragged product.
"""

from enum import StrEnum

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import iota
from jaxsched.models.config import MoeConfig

Array = jax.Array


class MoeForm(StrEnum):
    """How the products of the experts are arranged."""

    DENSE = "dense"
    RAGGED = "ragged"


def route(
    moe: MoeConfig, logits: Array, choice_bias: Array | None
) -> tuple[Array, Array]:
    """Experts of each token and their weights.

    Args:
      moe: the routing rule.
      logits: f32[T, E].
      choice_bias: f32[E], added for the choice only; None with "softmax_of_top_k".

    Returns:
      i32[T, k] experts, best first, and f32[T, k] weights.
    """
    if moe.router == "softmax_of_top_k":
        best, index = lax.top_k(logits, moe.top_k)
        return index, jax.nn.softmax(best, axis=-1)
    scores = jax.nn.sigmoid(logits)
    wish = _within_best_groups(moe, scores + choice_bias[None, :])
    _, index = lax.top_k(wish, moe.top_k)
    weights = jnp.take_along_axis(scores, index, axis=-1)
    if moe.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return index, weights * moe.scaling


def _within_best_groups(moe: MoeConfig, wish: Array) -> Array:
    """Wishes, -inf outside the groups whose two best experts sum highest."""
    grouped = wish.reshape(wish.shape[0], moe.num_groups, -1)
    two = min(2, grouped.shape[-1])
    value = jnp.sum(lax.top_k(grouped, two)[0], axis=-1)
    _, best = lax.top_k(value, moe.top_groups)
    groups = iota(moe.num_groups)
    chosen = jnp.any(best[:, :, None] == groups[None, None, :], axis=1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(wish.shape)


def experts_dense(x: Array, up: Array, down: Array, index, weights, inner) -> Array:
    """Every expert on every token, summed in the order of the experts.

    Args:
      x: [T, in]; up: [E, rows, in]; down: [E, in, F].
      index: i32[T, k]; weights: f32[T, k].
      inner: the function between the two products, [T, rows] -> [T, F].
    """
    numbers = iota(up.shape[0])
    spread = jnp.sum(
        jnp.where(index[:, :, None] == numbers[None, None], weights[..., None], 0.0),
        axis=1,
    )  # f32[T, E]

    def visit(total: Array, expert: tuple[Array, ...]) -> tuple[Array, None]:
        up, down, share = expert
        dims = (((1,), (1,)), ((), ()))
        out = lax.dot_general(inner(lax.dot_general(x, up, dims)), down, dims)
        return total + out.astype(jnp.float32) * share[:, None], None

    start = jnp.zeros(x.shape, jnp.float32)
    total, _ = lax.scan(visit, start, (up, down, spread.T))
    return total.astype(x.dtype)


def experts_ragged(x: Array, up: Array, down: Array, index, weights, inner) -> Array:
    """Tokens sorted by expert, one ragged product each way; as `experts_dense`."""
    tokens, k = index.shape
    flat = index.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=up.shape[0]).astype(jnp.int32)
    rows = jnp.take(x, order // k, axis=0)
    middle = inner(lax.ragged_dot(rows, up.transpose(0, 2, 1), sizes))
    out = lax.ragged_dot(middle, down.transpose(0, 2, 1), sizes)
    back = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    back = back.reshape(tokens, k, -1).astype(jnp.float32) * weights[..., None]
    # Added in the order of preference, one after the other: a fixed order.
    total = back[:, 0]
    for rank in range(1, k):
        total = total + back[:, rank]
    return total.astype(x.dtype)
