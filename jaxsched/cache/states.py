"""Recurrent states: live slots, snapshot slots, and what is remembered of each.

Slot 0 is a dummy for padding rows. Row r runs in live slot r + 1, always the same, so
a chunked request keeps its slot and state indices need no table. Snapshots lie in the
slots behind. A snapshot is never written again: a hit copies it into the live slot of
its row, filing copies the live slot out.

An *entry* describes one snapshot: where in which prompt, when it was used. When its
slot is taken away the entry stays for a while as a *ghost*: from ghosts the cache
learns which states would have been reused.

Shape letters: E entries, S slots of bulk arrays, C copies.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota

Array = jax.Array


class SnapshotKind(enum.IntEnum):
    """Why a snapshot was filed; the values of `StateTable.kind`."""

    ANSWER = 0  # at the end of an answer, for the next turn
    CONSUMED_ANSWER = 1  # the next turn has come
    FORK = 2  # where sequences part
    GRID = 3  # a periodic, offset or caller's point
    PROMPT_END = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateTable:
    """Entries; `depth` 0: unused, `slot` 0: a ghost."""

    slot: Array  # i32[E]  bulk slot of the snapshot
    depth: Array  # i32[E]  tokens that the state has seen
    block: Array  # i32[E]  block with token depth - 1, NO_ID: a ghost
    key: Array  # u32[2, E]  prefix key at its depth
    parent: Array  # i32[E]  next known state before it on its path, or NO_ID
    kind: Array  # i32[E]  a SnapshotKind
    last_used: Array  # i32[E]  tick of the last hit or filing
    last_passed: Array  # i32[E]  tick of the last hit at or behind it
    filed_at: Array  # i32[E]  milliseconds
    used_at: Array  # i32[E]  milliseconds, of the last (would-be) hit
    num_hits: Array  # i32[E]
    num_turns: Array  # i32[E]  answers before it
    sum_log_gap: Array  # f32[E]  logs of (gap + 3 s) between its session's turns
    num_gaps: Array  # i32[E]
    base_worth: Array  # f32[E]  GreedyDual: the clock when it was last used
    next_use: Array  # i32[E]  milliseconds; told by a simulator, else 0

    @property
    def num_entries(self) -> int:
        """E."""
        return self.depth.shape[0]

    @property
    def resident(self) -> Array:
        """Entries whose snapshot is there, bool[E]."""
        return self.slot > 0

    def replace(self, **fields: Array) -> "StateTable":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


def empty_states(num_entries: int) -> StateTable:
    """No snapshots and no ghosts."""

    def full(value: int, dtype=jnp.int32) -> Array:
        return jnp.full(num_entries, value, dtype)

    ints = {
        field.name: full(0)
        for field in dataclasses.fields(StateTable)
        if field.name not in ("key", "sum_log_gap", "base_worth")
    }
    ints.update(block=full(NO_ID), parent=full(NO_ID))
    return StateTable(
        key=jnp.zeros((2, num_entries), jnp.uint32),
        sum_log_gap=full(0, jnp.float32),
        base_worth=full(0, jnp.float32),
        **ints,
    )


def live_slot(row: Array) -> Array:
    """Bulk slot in which a row runs, i32; 0, the dummy, for NO_ID."""
    return jnp.where(row >= 0, row + 1, 0)


def copy_slots(pools, source: Array, target: Array):
    """Copies slots of *every* array of a pytree: nothing of a state is left behind.

    All reads come before all writes, so a slot may be source and target at once.

    Args:
      pools: any pytree; the first axis of every array is the slot.
      source: i32[C].
      target: i32[C]; past the end: nothing is written. Targets must differ.

    Returns:
      The pytree with the same shapes and dtypes.
    """

    def copy(array: Array) -> Array:
        taken = array.at[source].get(mode="fill", fill_value=0)
        return array.at[target].set(taken, mode="drop")

    return jax.tree.map(copy, pools)


def zero_slots(pools, target: Array):
    """Zeroes slots of every array of a pytree: rows that start without a hit."""
    return jax.tree.map(
        lambda array: array.at[target].set(jnp.zeros((), array.dtype), mode="drop"),
        pools,
    )


def nearest_ancestors(parent: Array, wanted: Array, rounds: int) -> Array:
    """The next entry before each that is wanted, or NO_ID; i32[E].

    Pointer doubling: log2(longest path) rounds.
    """
    size = parent.shape[0]
    wanted = jnp.append(wanted, True)  # the root stops every walk
    jump = jnp.append(jnp.where(parent < 0, size, parent), size)
    for _ in range(rounds):
        jump = jnp.where(wanted[jump], jump, jump[jump])
    stop = jump[:-1]
    return jnp.where((stop < size) & wanted[stop], stop, NO_ID)


def sum_behind(parent: Array, values: Array, rounds: int) -> Array:
    """Sums of values at and behind each entry; [E], by pointer doubling."""
    size = parent.shape[0]
    jump = jnp.where(parent < 0, size, parent)
    for _ in range(rounds):
        values = values + jnp.zeros_like(values).at[jump].add(values, mode="drop")
        jump = jnp.append(jump, size)[jump]
    return values


def most_behind(parent: Array, values: Array, rounds: int) -> Array:
    """Largest value >= 0 behind each entry, itself left out; f32[E]."""
    size = parent.shape[0]
    jump = jnp.where(parent < 0, size, parent)
    most = jnp.zeros_like(values).at[jump].max(values, mode="drop")
    for _ in range(rounds):
        most = most.at[jump].max(most, mode="drop")
        jump = jnp.append(jump, size)[jump]
    return most


def forget(states: StateTable, dropped: Array, rounds: int = 4) -> StateTable:
    """Frees entries; their children look past them to what is left before them."""
    parent = nearest_ancestors(states.parent, ~dropped, rounds)
    return states.replace(
        depth=jnp.where(dropped, 0, states.depth),
        parent=jnp.where(dropped, NO_ID, parent),
    )


def taken_slots(states: StateTable, num_slots: int) -> Array:
    """Which bulk slots hold a snapshot; bool[S]."""
    return jnp.zeros(num_slots, bool).at[states.slot].set(True, mode="drop")


def entries_at(mask: Array, fallback: int) -> Array:
    """Index of each true entry, `fallback` elsewhere; i32[E] of bool[E]."""
    return jnp.where(mask, iota(mask.shape[0]), fallback)
