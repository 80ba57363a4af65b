"""What a state, and the blocks under it, are worth keeping: policies as pure functions.

A policy gives every snapshot a worth; the smallest goes first. A block is worth the
most that any state at or behind it is worth, so blocks that no state needs go first
and every path is taken from its end. Worth is a number of few bits, see `selection`.

The score-based policies divide what a state saves by what its eviction frees: its own
bytes and, where no other state follows, the KV down to the next state or fork.

Sources: reuse counts and tempo, this package's own; GreedyDual-Size-Frequency,
Cherkasova 1998; used-state-only recency, SGLang PR 31648; clairvoyant, Belady 1966.
Shape letters: E entries, N blocks.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jaxsched.cache.blocks import BlockTable
from jaxsched.cache.ghosts import (
    ReuseStats,
    leaf_rates,
    reuse_rates,
    seconds_since,
)
from jaxsched.cache.selection import float_worth, recency
from jaxsched.cache.states import (
    SnapshotKind,
    StateTable,
    most_behind,
    nearest_ancestors,
    sum_behind,
)
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota, read_at

Array = jax.Array

TREE_ROUNDS = 8
"""Doublings along the tree of entries: paths of up to 256 known states are exact."""

_STATELESS_BITS = 12
_LIFE_S = 600.0


class Eviction(enum.StrEnum):
    """Which states and blocks go first."""

    LRU_PATHS = "lru_paths"  # a hit refreshes every state and block on its path
    LRU_LEAVES = "lru_leaves"  # the same, and inner states go only with their leaf
    LRU_STATES = "lru_states"  # a hit refreshes the KV and the state it used
    SUPERSEDED = "superseded"  # lru_paths, but a consumed answer's state goes first
    GREEDY_DUAL = "greedy_dual"  # saved tokens a byte, with frequency and a clock
    AGE_HISTOGRAM = "age_histogram"  # one learned law of reuse by age
    REUSE_DENSITY = "reuse_density"  # learned reuse rate x saved tokens / freed bytes
    CLAIRVOYANT = "clairvoyant"  # farthest next use; needs to be told it

    @property
    def scored(self) -> bool:
        """Whether a block's worth has to be looked up at the states behind it."""
        return self not in (
            Eviction.LRU_PATHS,
            Eviction.LRU_LEAVES,
            Eviction.LRU_STATES,
            Eviction.SUPERSEDED,
        )


@dataclasses.dataclass(frozen=True)
class Costs:
    """What eviction frees, in one unit: of a snapshot, and of one KV token."""

    state: float
    token: float


@dataclasses.dataclass(frozen=True)
class Worth:
    """Worth of states, and of the blocks that nothing else needs."""

    state: Array  # u32[E]  when the state goes, alone or with its blocks
    hold: Array  # u32[E]  what it lends to the blocks before it


def state_worth(
    policy: Eviction,
    states: StateTable,
    here: Array,
    stats: ReuseStats,
    *,
    tick: Array,
    now: Array,
    costs: Costs,
    bits: int,
) -> Worth:
    """Worth of each entry, in `bits` bits.

    Args:
      policy: static.
      states: the entries.
      here: bool[E], those that count as present: residents and what is being filed.
      stats: what was learned.
      tick: i32[], the logical clock.
      now: i32[], milliseconds.
      costs: static.
      bits: static.
    """
    if not policy.scored:
        used = policy == Eviction.LRU_STATES
        stamp = states.last_used if used else states.last_passed
        worth = recency(tick - stamp, bits)
        if policy == Eviction.SUPERSEDED:
            gone = states.kind == SnapshotKind.CONSUMED_ANSWER
            worth = jnp.where(gone, jnp.uint32(0), worth)
        return Worth(worth, worth)
    least = jnp.uint32(1 << _STATELESS_BITS)
    if policy == Eviction.CLAIRVOYANT:
        wait = (states.next_use - now) // 1000
        never = states.next_use <= now
        soon = recency(wait, bits - 1) + jnp.uint32(1 << (bits - 1))
        worth = jnp.where(never, least, soon)
        return Worth(worth, worth)
    state, hold = state_scores(policy, states, here, stats, now, costs)
    return Worth(
        jnp.maximum(float_worth(state, bits), least),
        jnp.maximum(float_worth(hold, bits), least),
    )


def state_scores(
    policy: Eviction,
    states: StateTable,
    here: Array,
    stats: ReuseStats,
    now: Array,
    costs: Costs,
) -> tuple[Array, Array]:
    """Scores of the learned and cost-aware policies, twice f32[E]; see `Worth`.

    A state can go in two ways: alone, while states behind it keep its blocks, or as
    the end of its path, with the blocks down to the next state or fork. As an end it
    answers for everything behind it as well. Taking the lower of both, but not before
    what is behind it, gives in one selection the order in which evicting one by one,
    with new scores after each, would come to them.
    """
    tree = _tree(states, here)
    alone, last = _rates(policy, states, here, stats, tree, now)
    saved = tree.saved
    cost = costs.state + costs.token * tree.freed
    base = states.base_worth if policy == Eviction.GREEDY_DUAL else jnp.float32(0)
    as_end = base + last * saved / jnp.maximum(cost, 1e-6)
    as_inner = base + alone * saved / max(costs.state, 1e-6)
    as_inner = jnp.where(tree.leaf, jnp.inf, as_inner)
    hold = jnp.where(here, jnp.minimum(as_inner, as_end), 0.0)
    behind = most_behind(states.parent, hold, TREE_ROUNDS)
    return jnp.minimum(as_inner, jnp.maximum(as_end, behind)), hold


@dataclasses.dataclass(frozen=True)
class _Tree:
    """What each entry saves and frees."""

    saved: Array  # f32[E]  tokens beyond the next lower state
    freed: Array  # f32[E]  KV tokens that go with it once it ends its path
    leaf: Array  # bool[E]  no other state is behind it


def _tree(states: StateTable, here: Array) -> _Tree:
    size = states.num_entries
    parent = jnp.where(states.parent < 0, size, states.parent)
    below = sum_behind(states.parent, here.astype(jnp.int32), TREE_ROUNDS)
    alive = (below > 0).astype(jnp.int32)
    branches = jnp.zeros(size, jnp.int32).at[parent].add(alive, mode="drop")
    lower = nearest_ancestors(states.parent, here, TREE_ROUNDS)
    parted = nearest_ancestors(states.parent, here | (branches > 1), TREE_ROUNDS)
    saved = states.depth - _depth_of(states, lower)
    freed = states.depth - _depth_of(states, parted)
    return _Tree(
        saved=saved.astype(jnp.float32),
        freed=freed.astype(jnp.float32),
        leaf=here & (below == 1),
    )


def _depth_of(states: StateTable, entry: Array) -> Array:
    return jnp.where(entry >= 0, states.depth[jnp.maximum(entry, 0)], 0)


def _rates(
    policy: Eviction,
    states: StateTable,
    here: Array,
    stats: ReuseStats,
    tree: _Tree,
    now: Array,
) -> tuple[Array, Array]:
    """Uses that each entry serves while others are behind it, and as an end; f32[E]."""
    if policy == Eviction.GREEDY_DUAL:
        frequency = (states.num_turns + states.num_hits + 1).astype(jnp.float32)
        return frequency, frequency
    if policy == Eviction.AGE_HISTOGRAM:
        rates = _age_rates(states, stats, here, tree.leaf, now)
        return rates, rates
    rates = jnp.where(states.depth > 0, reuse_rates(stats, states, now), 0.0)
    alone = demands(states, here, rates)
    return alone, sum_behind(states.parent, rates, TREE_ROUNDS)


def demands(states: StateTable, here: Array, rates: Array) -> Array:
    """Rates of each entry and of the ghosts that would fall back on it; f32[E]."""
    lower = nearest_ancestors(states.parent, here, TREE_ROUNDS)
    size = states.num_entries
    home = jnp.where(here, iota(size), lower)
    home = jnp.where(home >= 0, home, size)
    return jnp.zeros(size, jnp.float32).at[home].add(rates, mode="drop")


def _age_rates(
    states: StateTable, stats: ReuseStats, here: Array, leaf: Array, now: Array
) -> Array:
    inner = here & ~leaf
    count = jnp.sum(inner.astype(jnp.float32))
    hits = states.num_hits.astype(jnp.float32)
    mean = jnp.sum(jnp.where(inner, hits, 0.0)) / jnp.maximum(count, 1.0)
    life = seconds_since(now, states.filed_at)
    return jnp.where(
        leaf,
        leaf_rates(stats, states, leaf, now),
        (hits + mean) / (life + _LIFE_S),
    )


def block_worth(
    policy: Eviction,
    blocks: BlockTable,
    states: StateTable,
    hold: Array,
    here: Array,
    in_tree: Array,
    *,
    tick: Array,
    bits: int,
    rounds: int,
) -> Array:
    """Worth of each block, u32[N]: never below that of a state at or behind it.

    Args:
      policy: static.
      blocks: the pool.
      states: the entries.
      hold: u32[E], from `state_worth`.
      here: bool[E].
      in_tree: bool[N], blocks that are indexed or carry a snapshot.
      tick: i32[].
      bits: static.
      rounds: static, doublings along a path of blocks.
    """
    own = recency(tick - blocks.last_used, bits)
    if not policy.scored:
        return own
    # Blocks that no state needs, the longest unused first, before all others.
    own = recency(tick - blocks.last_used, _STATELESS_BITS)
    own = jnp.where(in_tree, own, jnp.uint32(0))
    size = blocks.num_blocks
    on = jnp.where(here & (states.block >= 0), states.block, size)
    most = own.at[on].max(hold, mode="drop")
    jump = jnp.where(in_tree & (blocks.parent >= 0), blocks.parent, size)
    for _ in range(rounds):
        most = most.at[jump].max(most, mode="drop")
        jump = read_at(jump, jump, size)
    return most


def leaf_bound(states: StateTable, worth: Array, own_block_worth: Array) -> Array:
    """`lru_leaves`: a state is worth what its block is worth; u32[E]."""
    at = jnp.maximum(states.block, 0)
    return jnp.where(states.block == NO_ID, worth, own_block_worth[at])
