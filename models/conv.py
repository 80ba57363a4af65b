"""The causal convolution before the scan, and the raw rows that cross calls.

A *raw* row is what the input projection's matrix product gave, before bias, multiplier
and convolution. Only raw rows are kept between calls: a row then passes through the
same elementwise code whether it was computed in this call or in an earlier one. (Kept
after a multiplication, it would be rounded; used fresh, the compiler may fuse the
multiplication with the next addition and not round. The bits would depend on the cut.)

A stored state of a request at position p is (`ssm`, `conv`, `tail`): the scan state
after `p - n` tokens, the K-1 raw rows before that, and the n raw rows after it. With
n = 0 it is an ordinary Mamba state. With tails in use, n = p mod Q: the next call
recomputes the open cell from its start, so any cut gives the bits of no cut.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.masking import iota

Array = jax.Array


class Cut(NamedTuple):
    """Where a cell's columns come from.

    Columns [lead, first_fresh) are carried in the tail; those before `lead` lie before
    the stored scan state and are skipped; [first_fresh, fill) are this call's tokens.
    """

    is_first: Array  # bool[C]  the request's first cell in this call
    lead: Array  # i32[C]
    first_fresh: Array  # i32[C]
    fill: Array  # i32[C]  columns from here on are padding


def merge_carried(
    fresh: Array, conv: Array, tail: Array, cut: Cut
) -> tuple[Array, Array]:
    """Raw rows of every column, carried ones put in place, and the rows before it.

    Args:
      fresh: [C, Q, raw] this call's product, garbage on columns that are not fresh.
      conv: [C, K-1, channels] rows before the stored scan state.
      tail: [C, Q-1 or 0, raw] rows after it.
      cut: where the columns come from.

    Returns:
      [C, K-1+Q, channels] rows of x, B, C, starting K-1 columns before the cell, and
      [C, Q] of dt, as [C, Q, H].
    """
    width, channels = conv.shape[1], conv.shape[2]
    columns = iota(fresh.shape[1])[None, :]
    carried_mask = (cut.is_first[:, None] & (columns < cut.first_fresh[:, None]))[
        ..., None
    ]
    stored = jnp.concatenate([conv, tail[..., :channels]], axis=1)
    steps = jnp.where(
        carried_mask,
        _rows(tail[..., channels:], columns - cut.lead[:, None]),
        fresh[..., channels:],
    )
    rows = jnp.where(
        carried_mask,
        _rows(stored, columns - cut.lead[:, None] + width),
        fresh[..., :channels],
    )
    # K-1 rows before the cell: stored ones, or the end of the cell before.
    ends = rows[:, rows.shape[1] - width :]
    previous = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    opening = _rows(conv, iota(width)[None, :] - cut.lead[:, None])
    opening = jnp.where(cut.is_first[:, None, None], opening, previous)
    return jnp.concatenate([opening, rows], axis=1), steps


def _rows(values: Array, index: Array) -> Array:
    """`values[c, index[c, i]]`, zeros where the index lies outside; [C, I, W]."""
    size = values.shape[1]
    if size == 0:
        return jnp.zeros((*index.shape, values.shape[2]), values.dtype)
    inside = (index >= 0) & (index < size)
    found = jnp.take_along_axis(values, jnp.clip(index, 0, size - 1)[..., None], axis=1)
    return jnp.where(inside[..., None], found, jnp.zeros_like(found))


def convolve(window: Array, weight: Array, bias: Array | None) -> Array:
    """Depthwise causal convolution and silu.

    Args:
      window: [..., K-1+T, channels], K-1 rows of history first.
      weight: [channels, K].
      bias: [channels] or None.

    Returns:
      [..., T, channels].
    """
    width = weight.shape[1]
    length = window.shape[-2] - width + 1
    out = None
    for k in range(width):
        taps = weight[:, k].reshape((1,) * (window.ndim - 1) + (-1,))
        term = jax.lax.slice_in_dim(window, k, k + length, axis=window.ndim - 2) * taps
        out = term if out is None else out + term
    if bias is not None:
        out = out + bias.reshape((1,) * (window.ndim - 1) + (-1,))
    return jax.nn.silu(out)


class Stored(NamedTuple):
    """The part of a stored state that consists of raw rows; E entries."""

    conv: Array  # [E, K-1, channels]
    tail: Array  # [E, Q-1 or 0, raw], zeros past the rows in use
    num_tail: Array  # i32[E]


def rows_to_store(
    window: Array, steps: Array, lead: Array, count: Array, plain: Array, size: int
) -> Stored:
    """What to keep of E cells after `count` columns each.

    Args:
      window: [E, K-1+Q, channels] as `merge_carried` gives it, one cell an entry.
      steps: [E, Q, H] raw dt of the same cells.
      lead: i32[E] first column after the scan state at the cell's start.
      count: i32[E] columns that the stored position lies behind the cell's start.
      plain: bool[E] store the state of that position itself, with no tail.
      size: rows of a tail.
    """
    width = window.shape[1] - steps.shape[1]
    first = jnp.where(plain, count, lead)
    conv = _rows(window, first[:, None] + iota(width)[None, :])
    num_tail = jnp.where(plain, 0, count - lead)
    at = lead[:, None] + iota(size)[None, :]
    rows = [_rows(window, at + width), _rows(steps, at)]
    in_use = (iota(size)[None, :] < num_tail[:, None])[..., None]
    tail = jnp.concatenate(rows, axis=-1)
    return Stored(conv, jnp.where(in_use, tail, jnp.zeros_like(tail)), num_tail)
