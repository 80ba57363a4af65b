"""Chunk sizes: how the tokens left after decoding are dealt to the queued prefills.

`chunk_sizes` is the function to call from other code: plain arrays in, sizes out. All
its numbers are traced, so it can be vmapped over capacities, units, limits and
intervals. The planner itself calls `deal_chunks`, one level below.

Reuse enters as a ceiling on cost: a chunk of `size` tokens of a row with K tokens that
must really be computed costs `min(size, K)`. That is equal to the published
shift-the-window rule for every size up to the remaining length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import MAX_COUNT, UNLIMITED, ChunkingPolicy, Rules
from jaxsched.core.masking import count_before, round_down, spend, wide_cumsum
from jaxsched.scheduling.equal_progress import equal_progress
from jaxsched.scheduling.first_fit import deal_in_order, fill_in_order
from jaxsched.scheduling.snapshots import next_point

Array = jax.Array


class Prefills(NamedTuple):
    """Rows that compete for chunks; a row that takes no part wants 0 tokens."""

    position: Array  # i32[R]  tokens computed
    want: Array  # i32[R]  tokens to the prompt's end or to the next stop
    charge: Array  # i32[R]  most that a chunk can be charged, at most `want`


class Limits(NamedTuple):
    """What the chunks of one step may take together."""

    capacity: Array  # i32[]  tokens; UNLIMITED: no limit
    unit: Array  # i32[]  tokens >= 1
    max_context_length: Array  # i32[]  tokens of one chunk; UNLIMITED: no limit
    max_rows: Array  # i32[]  rows; read by the jaxsched rules alone


def chunk_sizes(
    num_remaining_tokens: Array,
    num_computed_tokens: Array,
    snapshot_points: Array,
    capacity: Array | int,
    chunk_unit_size: Array | int,
    max_context_length: Array | int = UNLIMITED,
    *,
    snapshot_interval: Array | int = 0,
    num_reusable_tokens: Array | int = 0,
    max_rows: Array | int = UNLIMITED,
    policy: ChunkingPolicy = ChunkingPolicy.FORCE_CHUNK,
    rules: Rules = Rules.JAXSCHED,
) -> Array:
    """Chunk sizes of one step, for prefills given as plain arrays.

    Source: the chunking policies of TensorRT-LLM after PR #16427; what the `jaxsched`
    rules do instead stands at `deal_chunks`.

    Args:
      num_remaining_tokens: i32[R], prompt tokens still to compute, in first-come
        order; 0 on rows that take no part.
      num_computed_tokens: i32[R], where each row stands.
      snapshot_points: i32[R, S], absolute positions in any order, NO_ID padded.
      capacity: i32[], tokens that the chunks may take together, or UNLIMITED.
      chunk_unit_size: i32[], tokens >= 1.
      max_context_length: i32[], tokens of one chunk.
      snapshot_interval: i32[] or i32[R], tokens between further, periodic points.
      num_reusable_tokens: i32[] or i32[R], tokens that will not have to be computed.
      max_rows: i32[], rows that may get tokens (`jaxsched` rules alone).
      policy: static. `tensorrt_llm` rules honour points under FORCE_CHUNK alone.
      rules: static.

    Returns:
      i32[R], tokens; 0 on rows that got nothing.

    Raises:
      ValueError: at trace time, on policy `none`, which cuts no chunks, and on arrays
        whose shapes do not agree.
    """
    shape = jnp.shape(num_remaining_tokens)
    for name, array in (
        ("num_computed_tokens", num_computed_tokens),
        ("snapshot_points", snapshot_points),
    ):
        if len(shape) != 1 or jnp.shape(array)[:1] != shape:
            raise ValueError(
                f"num_remaining_tokens{list(shape)} and {name}"
                f"{list(jnp.shape(array))} must have one row for each request"
            )
    policy, rules = ChunkingPolicy(policy), Rules(rules)
    forced = policy == ChunkingPolicy.FORCE_CHUNK
    position = jnp.asarray(num_computed_tokens, jnp.int32)
    remaining = jnp.asarray(num_remaining_tokens, jnp.int32)
    interval, reusable = (
        jnp.broadcast_to(jnp.asarray(value, jnp.int32), shape)
        for value in (snapshot_interval, num_reusable_tokens)
    )
    prompt = position + remaining
    want = remaining
    if forced or rules == Rules.JAXSCHED:
        stop = next_point(position, prompt, interval, jnp.asarray(snapshot_points))
        want = jnp.where(remaining > 0, jnp.minimum(stop, prompt) - position, 0)
    spared = jnp.clip(reusable, 0, remaining)
    if rules == Rules.JAXSCHED:  # the last token of a prompt is always computed
        spared = jnp.minimum(spared, jnp.maximum(remaining - 1, 0))
    charge = want if forced else jnp.minimum(want, remaining - spared)
    limits = (capacity, chunk_unit_size, max_context_length, max_rows)
    limits = Limits(*(jnp.asarray(limit, jnp.int32) for limit in limits))
    return deal_chunks(Prefills(position, want, charge), limits, policy, rules)[0]


def deal_chunks(
    prefills: Prefills, limits: Limits, policy: ChunkingPolicy, rules: Rules
) -> tuple[Array, Array]:
    """Deals a capacity to prefills whose next stop and cost are known.

    Under the `jaxsched` rules a chunk cut by a limit *ends* on a multiple of the unit,
    a step with less than one unit to spend is dealt to the token in row order, and a
    row that gets nothing takes no seat. Under `tensorrt_llm` the *length* is a
    multiple of the unit, and seats have been taken before.

    Args:
      prefills: the rows, in first-come order.
      limits: traced scalars.
      policy: not `NONE`.
      rules: which rule set.

    Returns:
      i32[R], tokens; 0 on rows that got nothing. And bool[R], whether a seat was left
      when the row was reached.
    """
    if policy == ChunkingPolicy.NONE:
        raise ValueError("chunking_policy 'none' cuts no chunks")
    if rules == Rules.TENSORRT_LLM:
        if policy == ChunkingPolicy.EQUAL_PROGRESS:
            size = _published_equal_progress(prefills, limits)
        else:
            size = _published_in_order(prefills, limits)
        return size, jnp.ones_like(size, bool)
    if policy == ChunkingPolicy.EQUAL_PROGRESS:
        size = _aligned_equal_progress(prefills, limits)
    else:
        size = _aligned_in_order(prefills, limits)
    below_unit = jnp.minimum(limits.capacity, limits.max_context_length) < limits.unit
    size = jnp.where(below_unit, _to_the_token(prefills, limits), size)
    seat_left = count_before(size > 0) < limits.max_rows
    return jnp.where(seat_left, size, 0), seat_left


def _published_in_order(prefills: Prefills, limits: Limits) -> Array:
    """FORCE_CHUNK and FIRST_COME_FIRST_SERVED as published."""
    unit = limits.unit
    longest = round_down(limits.max_context_length, unit)
    over = prefills.charge > limits.max_context_length
    return deal_in_order(
        full=jnp.where(over, longest, prefills.want),
        cost=jnp.where(over, longest, prefills.charge),
        cut=lambda left: jnp.full_like(prefills.want, round_down(left, unit)),
        realign=jnp.zeros_like(prefills.want),
        capacity=limits.capacity,
    )


def _published_equal_progress(prefills: Prefills, limits: Limits) -> Array:
    longest = round_down(limits.max_context_length, limits.unit)
    size_limit = jnp.where(
        prefills.want > limits.max_context_length, longest, prefills.want
    )
    return equal_progress(
        size_limit,
        jnp.minimum(size_limit, prefills.charge),
        jnp.zeros_like(size_limit),
        limits.unit,
        limits.capacity,
        first_round=0,
    )


def _to_boundary(position: Array, room: Array, unit: Array) -> Array:
    """Size of the longest chunk within `room` tokens that ends on a unit boundary."""
    reach = position + jnp.minimum(room, MAX_COUNT)
    return jnp.maximum(round_down(reach, unit) - position, 0)


def _aligned_in_order(prefills: Prefills, limits: Limits) -> Array:
    """FORCE_CHUNK and FIRST_COME_FIRST_SERVED with chunk *ends* on unit boundaries."""
    position, want, charge = prefills
    unit, longest = limits.unit, limits.max_context_length
    over = charge > longest
    limited = _to_boundary(position, longest, unit)
    full = jnp.where(over, limited, want)
    cost = jnp.where(over, limited, charge)
    distance = unit - position % unit
    return deal_in_order(
        full=full,
        cost=cost,
        cut=lambda left: _to_boundary(position, left, unit),
        realign=jnp.where((distance < unit) & (distance < cost), distance, 0),
        capacity=limits.capacity,
    )


def _aligned_equal_progress(prefills: Prefills, limits: Limits) -> Array:
    position, want, charge = prefills
    unit, longest = limits.unit, limits.max_context_length
    size_limit = jnp.where(want > longest, _to_boundary(position, longest, unit), want)
    cost_limit = jnp.minimum(size_limit, charge)
    offset = position % unit
    # The first round decides who takes part: rows that it cannot serve, or for which
    # no seat is left, get nothing in later rounds either.
    offer = jnp.clip(unit - offset, 0, cost_limit)
    took = _take_while_it_fits(offer, limits.capacity) & (offer > 0)
    took &= count_before(took) < limits.max_rows
    return equal_progress(
        jnp.where(took, size_limit, 0),
        jnp.where(took, cost_limit, 0),
        jnp.where(took, offset, 0),
        unit,
        limits.capacity,
        first_round=1,
    )


def _take_while_it_fits(offer: Array, capacity: Array) -> Array:
    """Rows whose whole offer fits in order, passing over those that do not; bool[R]."""
    granted = deal_in_order(
        full=offer,
        cost=offer,
        cut=lambda left: jnp.zeros_like(offer),
        realign=jnp.zeros_like(offer),
        capacity=capacity,
    )
    return granted == offer


def _to_the_token(prefills: Prefills, limits: Limits) -> Array:
    """Sizes when less than one unit can be spent: rows are filled in order."""
    longest = limits.max_context_length
    over = prefills.charge > longest
    return fill_in_order(
        full=jnp.where(over, longest, prefills.want),
        cost=jnp.where(over, longest, prefills.charge),
        capacity=limits.capacity,
    )


def fit_draft_tokens(
    num_draft_tokens: Array,
    space: Array,
    charged: Array,
    capacity: Array,
) -> Array:
    """Draft tokens that last chunks keep: those that need neither block nor budget.

    Args:
      num_draft_tokens: i32[R], proposed; 0 on rows that may keep none.
      space: i32[R], tokens free behind the chunk's end in its last unit, >= 0.
      charged: u32[], tokens that the chunks were charged together.
      capacity: i32[], tokens or UNLIMITED.

    Returns:
      i32[R]; rows are served in order.
    """
    wanted = jnp.minimum(num_draft_tokens, space)
    total = wide_cumsum(wanted)
    left = spend(capacity, charged.astype(jnp.int32)).astype(jnp.uint32)
    kept = jnp.minimum(total, left) - jnp.minimum(
        total - wanted.astype(jnp.uint32), left
    )
    return kept.astype(jnp.int32)
