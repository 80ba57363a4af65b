"""Paged KV blocks: who refers to which, what they hold, which are free.

There is no free list. A block is free exactly when no row holds it, the index does not
know it, no snapshot hangs on it and no state lies in it; so freeing a block twice is a
non-event, and free + used = total by construction.

Shape letters: N blocks, D tokens of a block, R rows, B blocks of a row, A listed rows.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockTable:
    """The pool. `parent`, `number`, `key` and `tokens` are read only of blocks that
    the index knows or a snapshot hangs on."""

    tokens: Array  # i32[N, D]  what it was computed from; decides every hit
    parent: Array  # i32[N]  the block before it in its prompt, NO_ID: it is the first
    number: Array  # i32[N]  its place in its prompt, from 0
    key: Array  # u32[2, N]  prefix key at its end
    lora_id: Array  # i32[N]
    salt: Array  # i32[N]
    num_refs: Array  # i32[N]  rows whose table holds it
    last_used: Array  # i32[N]  tick of the last use
    place: Array  # i32[N]  where the index keeps it, NO_ID: not indexed
    state_slot: Array  # i32[N]  whose snapshot it is a page of, 0: none (shared arena)

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.place.shape[0]

    def replace(self, **fields: Array) -> "BlockTable":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowTable:
    """What the cache knows of the requests that run, one row each."""

    block_tables: Array  # i32[R, B]  block ids, N past the end of the row
    num_blocks: Array  # i32[R]
    num_tokens: Array  # i32[R]  computed and written
    num_indexed: Array  # i32[R]  full blocks that the index knows
    is_private: Array  # bool[R]  nothing of it is published any more
    is_used: Array  # bool[R]
    lora_id: Array  # i32[R]
    salt: Array  # i32[R]
    num_prompt_tokens: Array  # i32[R]
    branch_point: Array  # i32[R]  where it leaves a sequence seen before; 0: nowhere
    past_entry: Array  # i32[R]  deepest known state of its path at admission, or NO_ID
    last_entry: Array  # i32[R]  deepest state that it hit or filed itself, or NO_ID
    num_turns: Array  # i32[R]  answers on its path
    sum_log_gap: Array  # f32[R]  of the gaps between them
    num_gaps: Array  # i32[R]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_blocks.shape[0]

    def replace(self, **fields: Array) -> "RowTable":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


def empty_blocks(num_blocks: int, block_size: int) -> BlockTable:
    """A pool in which every block is free."""

    def full(value: int, dtype=jnp.int32) -> Array:
        return jnp.full(num_blocks, value, dtype)

    return BlockTable(
        tokens=jnp.zeros((num_blocks, block_size), jnp.int32),
        parent=full(NO_ID),
        number=full(0),
        key=jnp.zeros((2, num_blocks), jnp.uint32),
        lora_id=full(NO_ID),
        salt=full(0),
        num_refs=full(0),
        last_used=full(0),
        place=full(NO_ID),
        state_slot=full(0),
    )


def empty_rows(num_rows: int, blocks_per_row: int, num_blocks: int) -> RowTable:
    """Rows that hold nothing."""

    def full(value: int, dtype=jnp.int32) -> Array:
        return jnp.full(num_rows, value, dtype)

    return RowTable(
        block_tables=jnp.full((num_rows, blocks_per_row), num_blocks, jnp.int32),
        num_blocks=full(0),
        num_tokens=full(0),
        num_indexed=full(0),
        is_private=full(0, jnp.bool_),
        is_used=full(0, jnp.bool_),
        lora_id=full(NO_ID),
        salt=full(0),
        num_prompt_tokens=full(0),
        branch_point=full(0),
        past_entry=full(NO_ID),
        last_entry=full(NO_ID),
        num_turns=full(0),
        sum_log_gap=full(0, jnp.float32),
        num_gaps=full(0),
    )


def count_by_id(ids: Array, mask: Array, size: int) -> Array:
    """How many masked entries have each id; i32[size]. Ids outside count nowhere."""
    place = jnp.where(mask & (ids >= 0), ids, size).reshape(-1)
    return jnp.zeros(size, jnp.int32).at[place].add(1, mode="drop")


def free_blocks(blocks: BlockTable, hanging: Array, limit: Array) -> Array:
    """Blocks that can be handed out at once; bool[N].

    Args:
      blocks: the pool.
      hanging: i32[N], snapshots that hang on each block.
      limit: i32[], blocks in use by configuration; those behind it do not exist.
    """
    free = (blocks.num_refs == 0) & (blocks.place < 0) & (hanging == 0)
    return free & (blocks.state_slot == 0) & (iota(blocks.num_blocks) < limit)


def hold(blocks: BlockTable, ids: Array, mask: Array, tick: Array) -> BlockTable:
    """One more reference to each masked id, and a use; ids may repeat."""
    place = jnp.where(mask, ids, blocks.num_blocks).reshape(-1)
    return blocks.replace(
        num_refs=blocks.num_refs.at[place].add(1, mode="drop"),
        last_used=blocks.last_used.at[place].set(tick, mode="drop"),
    )


def let_go(blocks: BlockTable, ids: Array, mask: Array, tick: Array) -> BlockTable:
    """One reference less to each masked id, and a use."""
    place = jnp.where(mask, ids, blocks.num_blocks).reshape(-1)
    return blocks.replace(
        num_refs=blocks.num_refs.at[place].add(-1, mode="drop"),
        last_used=blocks.last_used.at[place].set(tick, mode="drop"),
    )


def write_tables(
    rows: RowTable, row: Array, start: Array, count: Array, ids: Array
) -> RowTable:
    """Appends `ids[a, :count[a]]` to the tables of listed rows at `start[a]`.

    Args:
      rows: the table.
      row: i32[A], past the end: nothing is written.
      start, count: i32[A].
      ids: i32[A, B].
    """
    column = iota(ids.shape[1])[None, :]
    to = jnp.where(column < count[:, None], start[:, None] + column, ids.shape[1])
    rows_of = jnp.broadcast_to(row[:, None], ids.shape)
    return rows.replace(
        block_tables=rows.block_tables.at[rows_of, to].set(ids, mode="drop"),
        num_blocks=rows.num_blocks.at[row].set(start + count, mode="drop"),
    )


def take_slices(order: Array, count: Array, width: int) -> Array:
    """Consecutive slices of a list: `count[a]` entries for each a; i32[A, width].

    Entries past a slice are the length of the list, which no write accepts.
    """
    size = order.shape[0]
    start = jnp.cumsum(count) - count
    column = iota(width)[None, :]
    at = jnp.where(column < count[:, None], start[:, None] + column, size)
    return order.at[at].get(mode="fill", fill_value=size)
