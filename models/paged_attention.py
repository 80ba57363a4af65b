"""Attention of ragged queries over a paged cache, block of keys after block of keys.

Keys are visited in blocks of one page, in order, with a running maximum and sum
(Milakov and Gimelshein, arXiv:1805.02867). A block that a query may not see changes
nothing of it, exactly: its weights are exact zeros and the running values are scaled by
exactly 1. So neither the width of the block table nor the length of the other requests
reaches a query's bits. A softmax over the whole table would round by its width.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import iota
from jaxsched.models.primitives import float32_einsum

Array = jax.Array

# Finite, so that a query that has seen no key yet has no infinity to subtract.
_NEVER = -1e30


def page_slots(
    block_tables: Array, positions: Array, valid: Array, page_size: int, num_pages: int
) -> tuple[Array, Array]:
    """Page and offset where each token's key is written; past the end if not valid.

    Args:
      block_tables: i32[A, B] page numbers in order of position.
      positions: i32[A, Q]; valid: bool[A, Q].
    """
    width = block_tables.shape[1]
    index = jnp.clip(positions // page_size, 0, width - 1)
    pages = jnp.take_along_axis(block_tables, index, axis=1)
    usable = valid & (pages >= 0) & (positions // page_size < width)
    return jnp.where(usable, pages, num_pages), positions % page_size


def paged_attention(
    queries: Array,
    key_pages: Array,
    value_pages: Array,
    block_tables: Array,
    positions: Array,
    num_keys: Array,
    *,
    layer: int,
    scale: float,
) -> Array:
    """Causal attention of A groups of Q queries, each group in a request of its own.

    Args:
      queries: [A, Q, heads, D].
      key_pages: [layers, pages, page_size, kv heads, D], the queries' own included.
      value_pages: as `key_pages`.
      block_tables: i32[A, B].
      positions: i32[A, Q] of the queries; a query sees keys at or before its own.
      num_keys: i32[A] keys that the group may need; 0: the group is padding.
      layer: which layer's pages; the stack is indexed block by block, since a slice of
        it would be a copy of all the layer's pages.
      scale: on the products.

    Returns:
      [A, Q, heads, D] in the queries' dtype; zeros for a query that sees no key.
    """
    groups, length, heads, dim = queries.shape
    page_size, kv_heads = key_pages.shape[2], key_pages.shape[3]
    grouped = queries.reshape(groups, length, kv_heads, heads // kv_heads, dim)

    def visit(block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest, total, out = carry
        pages = lax.dynamic_index_in_dim(block_tables, block, axis=1, keepdims=False)
        keys = key_pages.at[layer, pages].get(mode="clip")
        values = value_pages.at[layer, pages].get(mode="clip")
        scores = float32_einsum("aqkjd,askd->aqkjs", grouped, keys) * scale
        at = block * page_size + iota(page_size)
        seen = (at[None, None, :] <= positions[:, :, None]) & (
            at[None, None, :] < num_keys[:, None, None]
        )
        seen = seen[:, :, None, None, :]
        highest = jnp.max(jnp.where(seen, scores, _NEVER), axis=-1)
        largest, before = jnp.maximum(largest, highest), largest
        weights = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0.0)
        shrink = jnp.exp(before - largest)
        total = total * shrink + jnp.sum(weights, axis=-1)
        more = float32_einsum("aqkjs,askd->aqkjd", weights.astype(values.dtype), values)
        return largest, total, out * shrink[..., None] + more

    shape = grouped.shape[:-1]
    start = (
        jnp.full(shape, _NEVER, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    num_blocks = jnp.max((num_keys + page_size - 1) // page_size, initial=0)
    _, total, out = lax.fori_loop(0, num_blocks, visit, start)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(queries.shape).astype(queries.dtype)
