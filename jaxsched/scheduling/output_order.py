"""The output order of a plan: by group, then by adapter, then by row."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID, RowWalk
from jaxsched.core.masking import iota
from jaxsched.scheduling.walk import walks_of

Array = jax.Array

ENCODES, CHUNKS, LAST_CHUNKS, DECODES = range(4)
NUM_GROUPS = 4
"""Groups in the order of output; NUM_GROUPS itself stands for rows left out."""


def output_order(group: Array, lora_id: Array, by_lora: bool, walk: RowWalk) -> Array:
    """Rows by group, then adapter, then row; NO_ID behind the last; i32[R].

    Args:
      group: i32[R], NUM_GROUPS on rows that are left out.
      lora_id: i32[R].
      by_lora: static, whether adapters are looked at.
      walk: static.
    """
    order_by_group = walks_of(walk).order_by_group
    if not by_lora:
        return order_by_group(group, NUM_GROUPS)
    rows = _rows_by_adapter(lora_id)
    order = order_by_group(group[rows], NUM_GROUPS)
    return jnp.where(order == NO_ID, NO_ID, rows[order])


def _rows_by_adapter(lora_id: Array) -> Array:
    """Row indices by adapter, rows of one adapter in order; i32[R]."""
    rows = iota(lora_id.shape[0])
    if lora_id.shape[0] > 1 << 16:
        return lax.sort((lora_id, rows), num_keys=1, is_stable=True)[1]
    # Adapter and row fit into one key, and a sort without payload is much cheaper.
    key = ((lora_id + 1).astype(jnp.uint32) << 16) | rows.astype(jnp.uint32)
    return (lax.sort(key) & 0xFFFF).astype(jnp.int32)
