"""States by the block boundary at or before them: found without looking at them all.

A chain holds the states of one prefix that lie between a boundary and the next one.
The index finds its first state by the prefix key at the boundary, each state names the
next. A chain may hold states of another prefix (a collision of keys): who walks it
compares the key at each state's own depth, and tokens decide as everywhere.

Shape letters: E entries, N keys.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.index import PrefixIndex, empty_index, find, find_room, put
from jaxsched.core.config import NO_ID

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateChains:
    """Chains of states; entries are taken in turn and never given back."""

    index: PrefixIndex  # prefix key at a boundary -> the first state of its chain
    next: Array  # i32[E]  the state behind in its chain, NO_ID: the last
    num_filed: Array  # i32[]  entries in use


def empty_chains(num_entries: int) -> StateChains:
    """No states, room for so many."""
    return StateChains(
        index=empty_index(num_entries),
        next=jnp.full(num_entries, NO_ID, jnp.int32),
        num_filed=jnp.int32(0),
    )


def chain_starts(chains: StateChains, keys: Array) -> Array:
    """First state of the chain of each u32[2, N] boundary key, or NO_ID; i32[N]."""
    return find(chains.index, keys)


def append_state(
    chains: StateChains, key: Array, head: Array, stored: Array
) -> StateChains:
    """Puts the next entry into a chain.

    Where the index has no room for a new chain the entry is lost to lookups, which
    costs a hit and at half load practically never happens.

    Args:
      chains: the chains.
      key: u32[2], prefix key at the boundary.
      head: i32[], first state of its chain, or NO_ID: it begins one.
      stored: bool[]; False changes nothing.
    """
    entry, size = chains.num_filed, chains.next.shape[0]
    place = find_room(chains.index, key[:, None], (stored & (head < 0))[None])
    place = jnp.where(place < 0, chains.index.block.shape[0], place)
    # Behind the first one: so the index need not be written again.
    behind = jnp.where(stored & (head >= 0), head, size)
    rest = jnp.where(head >= 0, chains.next[jnp.maximum(head, 0)], NO_ID)
    link = chains.next.at[jnp.where(stored, entry, size)].set(rest, mode="drop")
    return StateChains(
        index=put(chains.index, place, key[:, None], entry[None]),
        next=link.at[behind].set(entry, mode="drop"),
        num_filed=entry + stored.astype(jnp.int32),
    )
