"""States in pools that are never short: nothing goes, so nothing has to be ranked.

For simulation: how much could be reused at all? Entries are taken in turn, found by
their chains (see `chains`), and carry nothing that only eviction reads. What a lookup
or a filing costs depends on the prompt and on the points of a step, not on how many
states there are. The answers are those of the limited cache with enough room; the
tests compare them.

Shape letters: A prompts, B blocks of a row, R rows, F points of a row, E entries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.cache.chains import append_state, chain_starts
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.keys import PromptKeys, keep_bits, root_keys, token_terms
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import first_true, iota

Array = jax.Array


def deepest_state(
    cache: HybridCache,
    keys: PromptKeys,
    length: Array,
    num_full: Array,
    config: HybridConfig,
) -> Array:
    """The deepest state on the path of each prompt that its blocks reach; i32[A].

    Args:
      cache: the tables.
      keys: of the prompts.
      length: i32[A], tokens; the state must leave one to compute.
      num_full: i32[A], blocks found.
      config: static.
    """
    chains, depths = cache.chains, cache.states.depth
    root = keep_bits(keys.root, keys.bits)[:, :, None]
    boundary = jnp.concatenate([root, keys.block_keys], axis=2)
    number = iota(boundary.shape[2])[None, :]
    inside = (number <= num_full[:, None]) & (
        number * config.block_size < length[:, None]
    )
    at = jnp.where(inside, chain_starts(chains, boundary), NO_ID)

    def walk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at, best, best_depth = carry
        entry = jnp.maximum(at, 0)
        depth = depths[entry]
        same = jnp.all(keys.at(depth) == cache.states.key[:, entry], axis=0)
        same &= (at >= 0) & (depth < length[:, None]) & (depth > 0)
        same &= depth // config.block_size == number
        depth = jnp.where(same, depth, 0)
        place = jnp.argmax(depth, axis=1)
        rows = iota(depth.shape[0])
        deeper = depth[rows, place] > best_depth
        best = jnp.where(deeper, at[rows, place], best)
        best_depth = jnp.where(deeper, depth[rows, place], best_depth)
        return jnp.where(at >= 0, chains.next[entry], NO_ID), best, best_depth

    none = jnp.full_like(length, NO_ID)
    carry = (at, none, jnp.zeros_like(length))
    return lax.while_loop(lambda carry: jnp.any(carry[0] >= 0), walk, carry)[1]


def file_unlimited(
    cache: HybridCache, tokens: Array, points: Array, config: HybridConfig
) -> tuple[HybridCache, Array, Array]:
    """Files the states at points of the rows, one after the other.

    Args:
      cache: the tables.
      tokens: i32[R, L].
      points: i32[R, F], depths or NO_ID.
      config: static.

    Returns:
      The cache; the slot of each state that was not there, i32[R, F], past the end for
      the others; and bool[R, F]: the cache has a state there now.
    """
    width = points.shape[1]
    depths = points.reshape(-1)

    def one(carry: tuple) -> tuple:
        cache, left, slot, known = carry
        which = first_true(left)
        row, depth = which // width, depths[which]
        cache, filed, there = _file_one(cache, tokens, row, depth, config)
        return (
            cache,
            left.at[which].set(False),
            slot.at[which].set(filed),
            known.at[which].set(there),
        )

    nothing = jnp.full(depths.shape, config.num_slots, jnp.int32)
    carry = (cache, depths > 0, nothing, jnp.zeros(depths.shape, bool))
    cache, _, slot, known = lax.while_loop(lambda c: jnp.any(c[1]), one, carry)
    return cache, slot.reshape(points.shape), known.reshape(points.shape)


def _file_one(
    cache: HybridCache, tokens: Array, row: Array, depth: Array, config: HybridConfig
) -> tuple[HybridCache, Array, Array]:
    rows, blocks, size = cache.rows, cache.blocks, config.block_size
    number = (depth - 1) // size
    indexed = rows.num_indexed[row]
    # A block that is not full must be the one right behind the published ones.
    is_open = (number == indexed) & (depth % size > 0)
    wanted = (number < indexed) | is_open
    wanted &= rows.is_used[row] & ~rows.is_private[row]
    wanted &= depth <= rows.num_tokens[row]
    before = rows.block_tables[row, jnp.maximum(number - 1, 0)]
    before = jnp.minimum(before, blocks.num_blocks - 1)
    root = root_keys(rows.lora_id[row], rows.salt[row], bits=config.key_bits)
    base = jnp.where(number > 0, blocks.key[:, before], root)
    inner = lax.dynamic_slice(tokens, (row, number * size), (1, size))[0]
    columns = number * size + iota(size)
    terms = jnp.where((columns < depth)[None, :], token_terms(inner, columns), 0)
    key = keep_bits(base + jnp.sum(terms, axis=1, dtype=jnp.uint32), config.key_bits)
    boundary = jnp.where(depth % size == 0, key, base)
    head = chain_starts(cache.chains, boundary[:, None])[0]
    head = jnp.where(wanted, head, NO_ID)
    there = _is_in_chain(cache, head, depth, key)
    entry = cache.chains.num_filed
    stored = wanted & ~there & (entry < cache.snapshot_limit)
    chains = append_state(cache.chains, boundary, head, stored)
    states, slot = cache.states, 1 + config.num_rows + entry
    block = rows.block_tables[row, number]

    def put(field: Array, value: Array) -> Array:
        where = jnp.where(stored, entry, states.num_entries)
        return field.at[..., where].set(value, mode="drop")

    states = states.replace(
        depth=put(states.depth, depth),
        key=put(states.key, key),
        slot=put(states.slot, slot),
        block=put(states.block, block),
    )
    where = jnp.where(stored & is_open, block, blocks.num_blocks)
    blocks = blocks.replace(
        tokens=blocks.tokens.at[where].set(inner, mode="drop"),
        parent=blocks.parent.at[where].set(
            jnp.where(number > 0, before, NO_ID), mode="drop"
        ),
        number=blocks.number.at[where].set(number, mode="drop"),
        lora_id=blocks.lora_id.at[where].set(rows.lora_id[row], mode="drop"),
        salt=blocks.salt.at[where].set(rows.salt[row], mode="drop"),
    )
    cache = cache.replace(states=states, blocks=blocks, chains=chains)
    return cache, jnp.where(stored, slot, config.num_slots), stored | there


def _is_in_chain(cache: HybridCache, head: Array, depth: Array, key: Array) -> Array:
    """Whether the chain from `head` on has a state at this depth and key; bool[]."""
    states = cache.states

    def is_it(at: Array) -> Array:
        entry = jnp.maximum(at, 0)
        same = jnp.all(states.key[:, entry] == key)
        return (at >= 0) & same & (states.depth[entry] == depth)

    last = lax.while_loop(
        lambda at: (at >= 0) & ~is_it(at),
        lambda at: cache.chains.next[jnp.maximum(at, 0)],
        head,
    )
    return is_it(last)
