"""Snapshot points: which prompt positions must be stood on, and the next one ahead.

The cache publishes the points of every request before each scheduling pass, and the
planner honours them (TensorRT-LLM PR #16427). Periodic points are never stored: they
follow from `RequestTable.snapshot_interval`, so a million-token prompt costs no more
than a short one. Only the few explicit ones take a column each.

Shape letters: R rows, A offsets from the start, Z offsets from the end, C points of
the caller, S published explicit points (S >= A + Z + C + 1).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.config import (
    MAX_COUNT,
    NO_ID,
    UNLIMITED,
    SchedulerConfig,
    SnapshotMode,
)
from jaxsched.core.host import check_count, check_counts
from jaxsched.core.masking import round_down
from jaxsched.core.requests import RequestTable

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SnapshotRules:
    """Where states are to be kept, for all requests; arrays, so they can be swept.

    Build one with `jaxsched.snapshot_rules`.
    """

    enable_prefix_caching: Array  # bool[]  False publishes nothing at all
    interval: Array  # i32[]  tokens between periodic points; 0: none
    from_start: Array  # i32[A]  offsets in tokens
    from_end: Array  # i32[Z]  offsets in tokens, counted back from the prompt's end
    save_last: Array  # bool[]  the last block boundary an identical prompt can reach
    block_size: Array  # i32[]  tokens; read by save_last alone


def snapshot_rules(
    *,
    interval: int = 0,
    from_start: Sequence[int] = (),
    from_end: Sequence[int] = (),
    save_last: bool = False,
    block_size: int = 1,
    enable_prefix_caching: bool = True,
) -> SnapshotRules:
    """Builds `SnapshotRules` from Python numbers.

    Raises:
      ValueError: naming the field, if an offset, the interval or the block size is
        not an integer in range.
    """
    return SnapshotRules(
        enable_prefix_caching=jnp.asarray(bool(enable_prefix_caching)),
        interval=jnp.int32(check_count("snapshot interval", interval)),
        from_start=_offsets("from_start", from_start),
        from_end=_offsets("from_end", from_end),
        save_last=jnp.asarray(bool(save_last)),
        block_size=jnp.int32(check_count("block_size", block_size, low=1)),
    )


def _offsets(field: str, offsets: Sequence[int]) -> Array:
    return jnp.asarray(check_counts(field, offsets), jnp.int32)


def publish(table: RequestTable, rules: SnapshotRules) -> RequestTable:
    """Writes every row's snapshot points, overwriting the last pass's.

    Published are the multiples of the interval up to and including the prompt length,
    offsets from the start that lie inside the prompt, offsets from the end that leave
    a positive position, the caller's own points inside the prompt, and with
    `save_last` the last block boundary that an identical prompt can reach (such a
    prompt reuses at most its length minus one). Nothing without prefix caching.

    Source: TensorRT-LLM PR #16427 and the offsets and save-last points added to it
    since; per-request points are this package's own.

    Raises:
      ValueError: at trace time, if `snapshot_points` has too few columns.
    """
    points = _explicit_points(table, rules)
    width, room = points.shape[1], table.snapshot_points.shape[1]
    if width > room:
        raise ValueError(
            f"snapshot_points has {room} columns but the rules publish up to {width}: "
            f"build the request table with num_points={width} or more"
        )
    points = jnp.pad(points, ((0, 0), (0, room - width)), constant_values=NO_ID)
    on = rules.enable_prefix_caching
    return table.replace(
        snapshot_interval=jnp.broadcast_to(
            jnp.where(on, rules.interval, 0), table.phase.shape
        ),
        snapshot_points=jnp.where(on, points, NO_ID),
    )


def _explicit_points(table: RequestTable, rules: SnapshotRules) -> Array:
    """Explicit points, i32[R, A + Z + C + 1], NO_ID where there is none."""
    prompt = table.num_prompt_tokens[:, None]
    start = jnp.broadcast_to(
        rules.from_start, (table.num_rows, rules.from_start.shape[0])
    )
    end = prompt - rules.from_end[None, :]
    last = jnp.where(rules.save_last, round_down(prompt - 1, rules.block_size), 0)
    candidates = jnp.concatenate([start, end, table.requested_points, last], axis=1)
    inside = (candidates > 0) & (candidates <= prompt)
    return jnp.where(inside, candidates, NO_ID)


def next_point(
    position: Array, num_prompt_tokens: Array, interval: Array, points: Array
) -> Array:
    """The smallest snapshot point above `position`, UNLIMITED where none; i32[R].

    Args:
      position: i32[R], tokens.
      num_prompt_tokens: i32[R]; points beyond it do not count.
      interval: i32[R], tokens between periodic points; 0: none.
      points: i32[R, S], explicit points in any order, NO_ID padded.
    """
    periodic = round_down(position, jnp.maximum(interval, 1)) + interval
    # A position past the prompt (UNLIMITED, say) may have wrapped the line above.
    ahead = position < num_prompt_tokens
    inside = (interval > 0) & ahead & (periodic <= num_prompt_tokens)
    periodic = jnp.where(inside, periodic, UNLIMITED)
    usable = points > position[..., None]
    usable &= points <= num_prompt_tokens[..., None]
    explicit = jnp.min(jnp.where(usable, points, UNLIMITED), axis=-1, initial=UNLIMITED)
    return jnp.minimum(periodic, explicit)


def next_snapshot_point(table: RequestTable, position: Array) -> Array:
    """The smallest published point above i32[R] `position`; see `next_point`."""
    return next_point(
        position,
        table.num_prompt_tokens,
        table.snapshot_interval,
        table.snapshot_points,
    )


def next_snapshot_points(table: RequestTable, position: Array, count: int) -> Array:
    """The `count` smallest published points above `position`, ascending; i32[R, count].

    UNLIMITED where there are fewer.
    """
    found = []
    for _ in range(count):
        position = next_snapshot_point(table, position)
        found.append(position)
    return jnp.stack(found, axis=-1)


def is_snapshot_point(table: RequestTable, position: Array) -> Array:
    """Whether i32[R] positions are published points of their rows; bool[R]."""
    return next_snapshot_point(table, position - 1) == position


def emit_points(table: RequestTable, end: Array, config: SchedulerConfig) -> Array:
    """Published points strictly inside each row's chunk, i32[R, E], NO_ID padded.

    Args:
      table: the table that is planned.
      end: i32[R], where each row's chunk ends.
      config: static; E is its `num_emit_columns`.
    """
    width = config.num_emit_columns
    if config.snapshot_mode == SnapshotMode.CUT:
        return jnp.full((table.num_rows, width), NO_ID, jnp.int32)
    points = next_snapshot_points(table, table.num_computed_tokens, width)
    return jnp.where(points < end[:, None], points, NO_ID)


def list_snapshot_points(
    num_prompt_tokens: int,
    *,
    interval: int | None = 0,
    from_start: Sequence[int] = (),
    from_end: Sequence[int] = (),
    requested: Sequence[int] = (),
    save_last: bool = False,
    block_size: int = 1,
    enable_prefix_caching: bool = True,
) -> list[int]:
    """The published points of one prompt as a Python list, ascending (host side).

    The same rule as `publish`, written out. An interval of None or below 1 publishes
    no periodic points. An offset of 0 from the start is listed as point 0, as the
    published managers do, although no chunk can end there.
    """
    if not enable_prefix_caching:
        return []
    prompt = check_count("num_prompt_tokens", num_prompt_tokens)
    step = 0 if interval is None else interval
    check_count("snapshot_interval", step, low=-MAX_COUNT)
    periodic = np.arange(step, prompt + 1, step) if step > 0 else np.zeros(0, int)
    points = set(periodic.tolist())
    points |= {at for at in check_counts("from_start", from_start) if at <= prompt}
    points |= {
        prompt - back for back in check_counts("from_end", from_end) if back < prompt
    }
    points |= {at for at in check_counts("requested", requested) if 0 < at <= prompt}
    if save_last and prompt > block_size:
        points.add((prompt - 1) // block_size * block_size)
    return sorted(points)
