"""Groups of equal values among a few hundred or thousand entries, without loops.

Small batches compare every pair; larger ones sort once. Both give the same answers.
Shape letter: N entries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import iota

Array = jax.Array

PAIRWISE_LIMIT = 768
"""Up to so many entries every pair is compared; above, one sort is cheaper."""


def first_equal(words: tuple[Array, ...], mask: Array) -> Array:
    """Index of the first masked entry with the same words; its own if not masked.

    Args:
      words: each [N], 32-bit integers.
      mask: bool[N].

    Returns:
      i32[N].
    """
    size = mask.shape[0]
    if size <= PAIRWISE_LIMIT:
        equal = mask[:, None] & mask[None, :]
        for word in words:
            equal &= word[:, None] == word[None, :]
        first = jnp.min(jnp.where(equal, iota(size)[None, :], size), axis=1)
        return jnp.where(mask, first, iota(size))
    ranked = _runs(words, mask)
    first = lax.cummax(jnp.where(ranked.starts, iota(size), 0))
    value = ranked.index[first]
    result = jnp.zeros(size, jnp.int32).at[ranked.index].set(value, unique_indices=True)
    return jnp.where(mask, result, iota(size))


def rank_in_group(values: Array, mask: Array) -> Array:
    """How many masked entries before each have the same i32[N] value; i32[N]."""
    size = mask.shape[0]
    if size <= PAIRWISE_LIMIT:
        equal = mask[None, :] & (values[:, None] == values[None, :])
        earlier = iota(size)[None, :] < iota(size)[:, None]
        return jnp.sum((equal & earlier).astype(jnp.int32), axis=1)
    ranked = _runs((values,), mask)
    first = lax.cummax(jnp.where(ranked.starts, iota(size), 0))
    rank = iota(size) - first
    return jnp.zeros(size, jnp.int32).at[ranked.index].set(rank, unique_indices=True)


class _Runs:
    """Entries in sorted order, the masked ones first, and where groups start."""

    def __init__(self, index: Array, starts: Array):
        self.index = index
        self.starts = starts


def _runs(words: tuple[Array, ...], mask: Array) -> _Runs:
    size = mask.shape[0]
    out = (~mask).astype(jnp.int32)
    *sorted_words, index = lax.sort(
        (out, *words, iota(size)), num_keys=len(words) + 1, is_stable=True
    )
    changed = jnp.zeros(size, bool).at[0].set(True)
    for word in sorted_words:
        changed = changed.at[1:].set(changed[1:] | (word[1:] != word[:-1]))
    return _Runs(index, changed)
