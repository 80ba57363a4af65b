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

from jaxsched.core.config import MAX_COUNT, UNLIMITED, ChunkingPolicy, RowWalk, Rules
from jaxsched.core.masking import count_before, offset_in, spend
from jaxsched.scheduling.equal_progress import equal_progress
from jaxsched.scheduling.snapshots import next_point
from jaxsched.scheduling.walk import Deal, to_boundary, walks_of

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
    row_walk: RowWalk = RowWalk.PARALLEL,
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
      row_walk: static; see `RowWalk`.

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
    prefills = Prefills(position, want, charge)
    return deal_chunks(prefills, limits, policy, rules, RowWalk(row_walk)).size


def deal_chunks(
    prefills: Prefills,
    limits: Limits,
    policy: ChunkingPolicy,
    rules: Rules,
    row_walk: RowWalk,
) -> Deal:
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
      row_walk: static.
    """
    if policy == ChunkingPolicy.NONE:
        raise ValueError("chunking_policy 'none' cuts no chunks")
    aligned = rules == Rules.JAXSCHED
    if not aligned:
        # Lengths are cut, not ends: as if every row stood on a boundary.
        prefills = prefills._replace(position=jnp.zeros_like(prefills.position))
    if policy != ChunkingPolicy.EQUAL_PROGRESS:
        unit = reachable_unit(limits) if aligned else limits.unit
        return _in_order(prefills, limits._replace(unit=unit), row_walk)
    if not aligned:
        return _published_equal_progress(prefills, limits, row_walk)
    below_unit = reachable_unit(limits) < limits.unit
    to_the_token = _in_order(prefills, limits._replace(unit=jnp.int32(1)), row_walk)
    rounds = _aligned_equal_progress(prefills, limits, row_walk)
    size = jnp.where(below_unit, to_the_token.size, rounds)
    return Deal(size, count_before(size > 0) < limits.max_rows)


def reachable_unit(limits: Limits) -> Array:
    """The unit, or 1 in a step in which no chunk can be a whole unit long.

    Cut to units such a step would give nothing, step after step. To the token, rows
    are filled in order, and re-align as soon as a unit can be spent again.
    """
    reach = jnp.minimum(limits.capacity, limits.max_context_length)
    return jnp.where(reach < limits.unit, 1, limits.unit)


def _in_order(prefills: Prefills, limits: Limits, row_walk: RowWalk) -> Deal:
    """FORCE_CHUNK and FIRST_COME_FIRST_SERVED."""
    full, cost = largest_chunk(prefills, limits)
    return walks_of(row_walk).deal_in_order(
        full, cost, prefills.position, limits.unit, limits.capacity, limits.max_rows
    )


def largest_chunk(prefills: Prefills, limits: Limits) -> tuple[Array, Array]:
    """Size and cost of the longest chunk that the context limit lets a row have."""
    position, want, charge = prefills
    over = charge > limits.max_context_length
    limited = to_boundary(position, limits.max_context_length, limits.unit)
    return jnp.where(over, limited, want), jnp.where(over, limited, charge)


def _size_limit(prefills: Prefills, limits: Limits) -> Array:
    """Longest chunk of each row; the context limit cuts to a unit boundary."""
    limited = to_boundary(prefills.position, limits.max_context_length, limits.unit)
    over = prefills.want > limits.max_context_length
    return jnp.where(over, limited, prefills.want)


def _published_equal_progress(
    prefills: Prefills, limits: Limits, row_walk: RowWalk
) -> Deal:
    size_limit = _size_limit(prefills, limits)
    size = equal_progress(
        size_limit,
        jnp.minimum(size_limit, prefills.charge),
        jnp.zeros_like(size_limit),
        limits.unit,
        limits.capacity,
        first_round=0,
        row_walk=row_walk,
    )
    return Deal(size, jnp.ones_like(size, bool))


def _aligned_equal_progress(
    prefills: Prefills, limits: Limits, row_walk: RowWalk
) -> Array:
    size_limit = _size_limit(prefills, limits)
    cost_limit = jnp.minimum(size_limit, prefills.charge)
    offset = offset_in(prefills.position, limits.unit)
    # The first round decides who takes part: rows that it cannot serve, or for which
    # no seat is left, get nothing in later rounds either.
    offer = jnp.clip(limits.unit - offset, 0, cost_limit)
    took = walks_of(row_walk).deal_in_order(
        offer,
        offer,
        jnp.zeros_like(offer),
        jnp.int32(MAX_COUNT + 1),  # all of an offer or nothing
        limits.capacity,
        limits.max_rows,
    )
    took = took.size > 0
    return equal_progress(
        jnp.where(took, size_limit, 0),
        jnp.where(took, cost_limit, 0),
        jnp.where(took, offset, 0),
        limits.unit,
        limits.capacity,
        first_round=1,
        row_walk=row_walk,
    )


def fit_draft_tokens(
    num_draft_tokens: Array,
    space: Array,
    charged: Array,
    capacity: Array,
    row_walk: RowWalk,
) -> Array:
    """Draft tokens that last chunks keep: those that need neither block nor budget.

    Args:
      num_draft_tokens: i32[R], proposed; 0 on rows that may keep none.
      space: i32[R], tokens free behind the chunk's end in its last unit, >= 0.
      charged: i32[], tokens that the chunks were charged together.
      capacity: i32[], tokens or UNLIMITED.
      row_walk: static.

    Returns:
      i32[R]; rows are served in order.
    """
    wanted = jnp.minimum(num_draft_tokens, space)
    return walks_of(row_walk).deal_wanted(wanted, spend(capacity, charged))
