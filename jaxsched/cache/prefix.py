"""Longest prefix match of many prompts at once, blocks and states, exact.

Every block of every prompt is looked up at once; a block counts only if its tokens and
its parent are right, so by induction the whole prefix is right, whatever the hash does.
States are matched from their own side, by the prefix key at their depth, since a state
at an unaligned depth hangs on a partial block that no index knows; the deepest one is
then checked by tokens as well. A hybrid hit at n needs every block of [0, n), a state
after exactly n tokens, and n <= prompt - 1: one token is always computed.

Shape letters: A prompts, L tokens of the longest, B blocks of a row, E entries.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.index import find
from jaxsched.cache.keys import PromptKeys, prompt_keys
from jaxsched.cache.states import SnapshotKind
from jaxsched.cache.unlimited import deepest_state
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota

Array = jax.Array


class MissReason(enum.IntEnum):
    """What kept a prompt from reusing more; the values of `Match.miss_reason`."""

    NONE = 0  # it reuses all that it shares with what was computed before
    NO_PREFIX = 1  # no block of it was ever computed
    NO_STATE = 2  # blocks are there, a state is not
    NO_KV = 3  # a state is known, its blocks are not there
    EVICTED = 4  # more was there once
    FLOORED = 5  # the deepest state lies before the deepest block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """A prompts to be looked up; rows of length 0 are padding."""

    tokens: Array  # i32[A, L]  L = B * block_size
    length: Array  # i32[A]
    lora_id: Array  # i32[A]  NO_ID: none
    salt: Array  # i32[A]  prompts of different salts share nothing
    reads: Array  # bool[A]  may reuse what is cached; false: it finds nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """What the cache has of each prompt. A value: nothing is held by it."""

    num_cached_tokens: Array  # i32[A]  reusable: blocks and a state
    num_kv_matched_tokens: Array  # i32[A]  blocks alone
    num_state_matched_tokens: Array  # i32[A]  deepest state
    miss_reason: Array  # i32[A]  a MissReason
    branch_point: Array  # i32[A]  where it leaves what was seen before; 0: nowhere
    ghost_point: Array  # i32[A]  depth of an evicted state worth filing again; or 0
    block_ids: Array  # i32[A, B]  the blocks it shares, NO_ID behind them
    entry: Array  # i32[A]  the state it reuses, or NO_ID
    past_entry: Array  # i32[A]  the deepest state known of its path, or NO_ID
    continues_answer: Array  # bool[A]  and that was the end of an answer
    num_seen_tokens: (
        Array  # i32[A]  ever computed of it and reusable: what it might have
    )
    on_path: (
        Array  # bool[A, E]  entries on its path, ghosts included; unlimited: [A, 0]
    )


def lookup(cache: HybridCache, prompts: Prompts, config: HybridConfig) -> Match:
    """The longest hybrid hit of each prompt and why it is not longer.

    Reads the cache and changes nothing. See `lookup_keys` for prompts whose keys
    were computed when they arrived.
    """
    keys = prompt_keys(
        prompts.tokens,
        prompts.lora_id,
        prompts.salt,
        block_size=config.block_size,
        bits=config.key_bits,
    )
    return lookup_keys(cache, prompts, keys, config)


def lookup_keys(
    cache: HybridCache, prompts: Prompts, keys: PromptKeys, config: HybridConfig
) -> Match:
    """`lookup` with the prompts' keys given."""
    length = jnp.where(prompts.reads, prompts.length, 0)
    ids, seen = _match_blocks(cache, prompts, keys, length, config)
    num_full = _leading(ids >= 0)
    states = cache.states
    if config.is_unlimited:
        on_path = jnp.zeros((ids.shape[0], 0), bool)
        entry = past = deepest_state(cache, keys, length, num_full, config)
        gone = jnp.zeros_like(entry)
    else:
        on_path = _paths(cache, keys, length)
        within = states.depth[None, :] // config.block_size <= num_full[:, None]
        usable = on_path & states.resident[None, :] & within
        entry = _deepest(states.depth, usable)
        past = _deepest(states.depth, on_path)
        lost = on_path & ~states.resident[None, :]
        gone = jnp.max(jnp.where(lost, states.depth[None, :], 0), axis=1, initial=0)
    reach, entry = _verify_states(cache, prompts, ids, entry)
    if config.is_unlimited:
        past = entry
    at = jnp.maximum(entry, 0)
    deepest = jnp.where(entry >= 0, states.depth[at], 0)
    kv = jnp.minimum(num_full * config.block_size, jnp.maximum(length - 1, 0))
    kv = jnp.maximum(kv, deepest)
    seen_tokens = jnp.maximum(seen, num_full) * config.block_size
    was_there = (gone > deepest) | (seen > num_full)
    most_seen = jnp.minimum(seen_tokens, jnp.maximum(length - 1, 0))
    return Match(
        num_cached_tokens=deepest,
        num_kv_matched_tokens=kv,
        num_state_matched_tokens=deepest,
        miss_reason=_reason(kv, deepest, was_there),
        branch_point=_branch(cache, past, deepest, seen_tokens, length, config),
        ghost_point=_ghost(cache, past, deepest),
        block_ids=jnp.where(iota(ids.shape[1])[None, :] < reach[:, None], ids, NO_ID),
        entry=entry,
        past_entry=past,
        continues_answer=_is_answer(cache, past),
        num_seen_tokens=jnp.maximum(kv, jnp.maximum(gone, most_seen)),
        on_path=on_path,
    )


def _leading(mask: Array) -> Array:
    """How many entries are true before the first false one; i32[A] of bool[A, B]."""
    width = mask.shape[1]
    misses = jnp.where(mask, width, iota(width)[None, :])
    return jnp.min(misses, axis=1, initial=width)


def _match_blocks(
    cache: HybridCache,
    prompts: Prompts,
    keys: PromptKeys,
    length: Array,
    config: HybridConfig,
) -> tuple[Array, Array]:
    """Verified block of each place, NO_ID else, i32[A, B]; blocks seen once, i32[A]."""
    blocks = cache.blocks
    size, width = config.block_size, config.blocks_per_row
    found_keys = keys.block_keys
    ids = find(cache.index, found_keys)
    at = jnp.maximum(ids, 0)
    before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=NO_ID)
    rows = (ids.shape[0], width, size)
    same = jnp.all(blocks.tokens[at] == prompts.tokens.reshape(rows), axis=2)
    inside = (iota(width)[None, :] + 1) * size <= length[:, None]
    root = (blocks.lora_id[at[:, 0]] == prompts.lora_id) & (
        blocks.salt[at[:, 0]] == prompts.salt
    )
    good = (ids >= 0) & inside & same & (blocks.parent[at] == before)
    good = good.at[:, 0].set(good[:, 0] & root)
    if config.is_unlimited:
        return jnp.where(good, ids, NO_ID), jnp.zeros_like(length)
    marks = cache.seen[seen_place(found_keys, cache.seen.shape[0])]
    below = (iota(width)[None, :] + 1) * size < length[:, None]
    known = below & (marks == seen_mark(found_keys))
    seen = jnp.max(jnp.where(known, iota(width)[None, :] + 1, 0), axis=1)
    return jnp.where(good, ids, NO_ID), seen


def seen_place(keys: Array, size: int) -> Array:
    """Where a block key is remembered, i32[...] of u32[2, ...]."""
    return (keys[0] & jnp.uint32(size - 1)).astype(jnp.int32)


def seen_mark(keys: Array) -> Array:
    """What is remembered of it, u32[...]; never 0."""
    return keys[1] | jnp.uint32(1)


def _paths(cache: HybridCache, keys: PromptKeys, length: Array) -> Array:
    """Entries that lie on each prompt's path by their keys; bool[A, E]."""
    states = cache.states
    depth = jnp.broadcast_to(
        states.depth[None, :], (length.shape[0], states.num_entries)
    )
    same = jnp.all(keys.at(depth) == states.key[:, None, :], axis=0)
    return same & (depth > 0) & (depth < length[:, None])


def _verify_states(
    cache: HybridCache, prompts: Prompts, ids: Array, entry: Array
) -> tuple[Array, Array]:
    """Full blocks to share, and the states to reuse whose tokens are right; i32[A].

    The block under the last token of a state must itself be found or be checked: a
    state at the end of an unfound block would share that block unverified.
    """
    states, blocks = cache.states, cache.blocks
    size = blocks.tokens.shape[1]
    rows, width = ids.shape
    at = jnp.maximum(entry, 0)
    last = states.depth[at] - 1
    number, offset = last // size, last % size
    block = jnp.maximum(states.block[at], 0)
    tokens = prompts.tokens.reshape(rows, width, size)
    tokens = tokens[iota(rows), jnp.clip(number, 0, width - 1)]
    equal = (blocks.tokens[block] == tokens) | (iota(size)[None, :] > offset[:, None])
    before = ids[iota(rows), jnp.clip(number - 1, 0, width - 1)]
    parent = jnp.where(number > 0, before, NO_ID)
    right = jnp.all(equal, axis=1) & (blocks.parent[block] == parent)
    root = (blocks.lora_id[block] == prompts.lora_id) & (
        blocks.salt[block] == prompts.salt
    )
    right &= (entry >= 0) & root & (blocks.number[block] == number)
    entry = jnp.where(right, entry, NO_ID)
    reach = jnp.where(right, (last + 1) // size, 0)
    return reach, entry


def _deepest(depth: Array, mask: Array) -> Array:
    """The deepest masked entry of each row, NO_ID where none; i32[A]."""
    value = jnp.where(mask, depth[None, :], 0)
    best = jnp.argmax(value, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(mask, axis=1), best, NO_ID)


def _reason(kv: Array, deepest: Array, was_there: Array) -> Array:
    """A MissReason for each prompt, i32[A]."""
    reason = jnp.where(deepest == 0, MissReason.NO_STATE, MissReason.FLOORED)
    reason = jnp.where(deepest == kv, MissReason.NONE, reason)
    reason = jnp.where(kv == 0, MissReason.NO_PREFIX, reason)
    return jnp.where(was_there, MissReason.EVICTED, reason).astype(jnp.int32)


def _branch(
    cache: HybridCache,
    past: Array,
    deepest: Array,
    seen_tokens: Array,
    length: Array,
    config: HybridConfig,
) -> Array:
    """Where each prompt leaves a sequence seen before, on a block boundary; i32[A].

    Not where it only goes on behind an answer whose state was evicted: the block that
    the answer ends in was never full, so the last full one says nothing of a fork.
    """
    states = cache.states
    at = jnp.maximum(past, 0)
    goes_on = _is_answer(cache, past) & (
        states.depth[at] - seen_tokens < config.block_size
    )
    goes_on &= states.depth[at] >= seen_tokens
    new = (seen_tokens > deepest) & (seen_tokens < length) & ~goes_on
    return jnp.where(new, seen_tokens, 0)


def _is_answer(cache: HybridCache, entry: Array) -> Array:
    """Whether entries are ends of answers, consumed ones included; bool[A]."""
    kind = cache.states.kind[jnp.maximum(entry, 0)]
    return (entry >= 0) & (kind <= SnapshotKind.CONSUMED_ANSWER)


def _ghost(cache: HybridCache, past: Array, deepest: Array) -> Array:
    """Depth of an evicted fork, grid or prompt-end state that would be hit; i32[A]."""
    states = cache.states
    at = jnp.maximum(past, 0)
    lost = (past >= 0) & ~states.resident[at] & (states.depth[at] > deepest)
    shared = states.kind[at] > SnapshotKind.CONSUMED_ANSWER
    return jnp.where(lost & shared, states.depth[at], 0)
