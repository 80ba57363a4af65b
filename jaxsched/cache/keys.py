"""Prefix keys: a 64-bit hash of a prompt's first d tokens, for any depth d.

A key is a sum, so that every prefix of a prompt has one and blocks of any size and
snapshots at any depth share it: key(d) = root + sum over positions p < d of
mix(token[p], p), in two 32-bit words modulo 2**32. The position is inside the mix, so
order matters. The root holds the adapter and the salt. A key only *finds* candidates;
tokens decide, so a collision costs a hit and never gives a wrong one.

Shape letters: A prompts, L tokens of the longest, D block size, N keys.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.masking import iota

Array = jax.Array

WORD_BITS = 32

_GRAIN = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptKeys:
    """Keys of every prefix of A prompts; compute them once, when a prompt arrives."""

    root: Array  # u32[2, A]  key of the empty prefix
    before: Array  # u32[2, A, L/D]  key where a block begins
    inside: Array  # u32[2, A, L/D, D]  sum over the block up to and with a position
    bits: int = dataclasses.field(default=32, metadata={"static": True})

    @property
    def block_keys(self) -> Array:
        """Keys at the ends of blocks, u32[2, A, L/D]."""
        return keep_bits(self.before + self.inside[..., -1], self.bits)

    def at(self, depth: Array) -> Array:
        """Keys at i32[A, N] depths; u32[2, A, N]. Depths outside give other keys."""
        num_blocks, size = self.inside.shape[-2:]
        last = jnp.clip(depth - 1, 0, num_blocks * size - 1)
        rows = jnp.broadcast_to(iota(depth.shape[0])[:, None], depth.shape)
        found = self.before[:, rows, last // size]
        found = found + self.inside[:, rows, last // size, last % size]
        found = jnp.where(depth[None] == 0, self.root[:, :, None], found)
        return keep_bits(found, self.bits)


def prompt_keys(
    tokens: Array, lora_id: Array, salt: Array, *, block_size: int, bits: int = 32
) -> PromptKeys:
    """Keys of all prefixes of A prompts.

    Args:
      tokens: i32[A, L], L a multiple of the block size.
      lora_id: i32[A], NO_ID: none.
      salt: i32[A]; prompts with different salts share nothing.
      block_size: tokens.
      bits: kept of each word; fewer than 32 only to test collisions.

    Raises:
      ValueError: if L is not a multiple of the block size.
    """
    rows, length = tokens.shape
    if length % block_size:
        raise ValueError(
            f"tokens must have a multiple of block_size={block_size} columns, "
            f"got {length}"
        )
    root = root_keys(lora_id, salt, bits=bits)
    terms = token_terms(tokens, jnp.broadcast_to(iota(length)[None, :], tokens.shape))
    terms = terms.reshape(2, rows, length // block_size, block_size)
    totals = jnp.sum(terms, axis=-1, dtype=jnp.uint32)
    before = root[:, :, None] + jnp.cumsum(totals, axis=-1) - totals
    return PromptKeys(
        root=root,
        before=before,
        inside=_running_sum(terms),
        bits=bits,
    )


def root_keys(lora_id: Array, salt: Array, *, bits: int = 32) -> Array:
    """Keys of empty prefixes, u32[2, N], of i32[N] adapters and salts."""
    first = _finish(lora_id.astype(jnp.uint32) * jnp.uint32(0xC2B2AE3D))
    x = _finish(first ^ (salt.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F)))
    return keep_bits(jnp.stack([x, _second(x)]), bits)


def token_terms(tokens: Array, positions: Array) -> Array:
    """What each token adds to the keys behind it; u32[2, ...] of i32[...]."""
    x = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x = x + positions.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    x = _finish(x + jnp.uint32(0x165667B1))
    return jnp.stack([x, _second(x)])


def keep_bits(words: Array, bits: int) -> Array:
    """The low bits of u32 words; all of them unless collisions are wanted."""
    if bits == WORD_BITS:
        return words
    return words & jnp.uint32((1 << bits) - 1)


def _finish(x: Array) -> Array:
    """An invertible mix of 32 bits (constants of C. Wellons' search, `lowbias32`)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _second(x: Array) -> Array:
    """A second word from the first: one more round with other constants."""
    y = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x2C1B3C6D)
    return y ^ (y >> jnp.uint32(13))


def _running_sum(values: Array) -> Array:
    """Inclusive sums over the last axis of u32 values.

    Eight at a time against a triangle of ones, which fuses into one pass: four times
    faster on a CPU than XLA's cumsum over a short minor axis, or than doubling alone.
    """
    size = values.shape[-1]
    if size % _GRAIN or size == _GRAIN:
        return _doubled_sum(values)
    values = values.reshape(*values.shape[:-1], size // _GRAIN, _GRAIN)
    triangle = jnp.asarray(np.triu(np.ones((_GRAIN, _GRAIN), np.uint32)))
    triangle = triangle.reshape((1,) * (values.ndim - 1) + triangle.shape)
    inner = jnp.sum(values[..., :, None] * triangle, axis=-2, dtype=jnp.uint32)
    totals = jnp.sum(values, axis=-1, dtype=jnp.uint32)
    before = _doubled_sum(totals) - totals
    return (inner + before[..., None]).reshape(*values.shape[:-2], size)


def _doubled_sum(values: Array) -> Array:
    """The same by shifting and adding, log2 steps."""
    size, step = values.shape[-1], 1
    while step < size:
        moved = jnp.pad(values[..., :-step], [(0, 0)] * (values.ndim - 1) + [(step, 0)])
        values = values + moved
        step *= 2
    return values
