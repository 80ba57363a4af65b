"""How much memory a number of tokens takes: affine in the tokens, as published.

`manager` names the published cache managers, whose formulas differ: `unified` keeps
states in the block pool (TensorRT-LLM's C++ manager), `separate` in pools of their own
(its second Python manager).
Source: the hybrid cache managers of TensorRT-LLM after PR #16427.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence

from jaxsched.core.host import check_count, check_counts

MANAGERS = ("unified", "separate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AffineMemory:
    """`bytes = slope * tokens + intercept`."""

    slope: int
    intercept: int

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the cache of so many tokens."""
        return self.slope * tokens + self.intercept

    def tokens_in(self, budget: int) -> int | None:
        """Tokens that a budget holds; None: tokens cost nothing here."""
        if self.slope == 0:
            return None
        return max(0, (budget - self.intercept) // self.slope)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotRules:
    """How many fixed snapshots a sequence keeps beside the periodic ones."""

    count: int
    unaligned: int  # of those, rules whose point need not be on a block boundary


def count_snapshot_rules(
    *,
    offsets_from_start: Iterable[int] = (),
    offsets_from_end: Iterable[int] = (),
    max_seq_len: int,
    block_size: int,
) -> SnapshotRules:
    """Distinct offsets that lie inside the longest sequence.

    Offsets from the end count as unaligned: prompts end anywhere.
    """
    starts = set(check_counts("offsets_from_start", offsets_from_start))
    ends = set(check_counts("offsets_from_end", offsets_from_end))
    starts = {offset for offset in starts if offset <= max_seq_len}
    ends = {offset for offset in ends if offset < max_seq_len}
    unaligned = sum(offset % block_size != 0 for offset in starts) + len(ends)
    return SnapshotRules(count=len(starts) + len(ends), unaligned=unaligned)


def affine_memory(
    *,
    kv_bytes_per_token: int,
    state_bytes: int,
    max_num_seqs: int,
    block_size: int,
    max_seq_len: int,
    pipeline_parallel: int = 1,
    num_spare_slots: int = 1,
    snapshot_interval: int = 0,
    num_rules: int = 0,
    manager: str = "separate",
) -> AffineMemory:
    """Bytes as a function of the cached tokens, on one rank.

    Args:
      kv_bytes_per_token: of the rank's attention layers.
      state_bytes: one state of the rank's recurrent layers.
      max_num_seqs: requests of one step.
      block_size: tokens.
      max_seq_len: tokens of the longest sequence; an interval above it never acts.
      pipeline_parallel: steps in flight, each with its own live states.
      num_spare_slots: padding and placeholder states, see `num_spare_state_slots`.
      snapshot_interval: tokens between periodic snapshots; 0: none.
      num_rules: fixed snapshots a sequence, see `count_snapshot_rules`.
      manager: `separate` or `unified`; the latter ignores the fixed snapshots.

    Raises:
      ValueError: naming the field.
    """
    _check_manager(manager)
    unified = manager == "unified"
    interval = active_interval(snapshot_interval, max_seq_len)
    live = max_num_seqs * pipeline_parallel
    rules = 0 if unified else num_rules
    spare = 1 if unified else num_spare_slots
    partial = live if not unified and (rules or interval) else 0
    states = live + spare + live * rules
    slope = kv_bytes_per_token
    if interval:
        slope += -(-state_bytes // interval)
        if unified and interval % block_size:
            slope += -(-block_size * kv_bytes_per_token // interval)
    return AffineMemory(
        slope=slope,
        intercept=states * state_bytes + partial * block_size * kv_bytes_per_token,
    )


def active_interval(snapshot_interval: int | None, max_seq_len: int) -> int:
    """The interval, or 0 where it is off or above the longest sequence."""
    if snapshot_interval is None or snapshot_interval <= 0:
        return 0
    return snapshot_interval if snapshot_interval <= max_seq_len else 0


def _check_manager(manager: str) -> None:
    if manager not in MANAGERS:
        names = ", ".join(MANAGERS)
        raise ValueError(f"manager must be one of {names}, got {manager!r}")


def num_spare_state_slots(
    *,
    draft_lengths: Mapping[int, int] | None = None,
    max_num_seqs: int = 1,
    accepts_variable_lengths: bool = False,
    attention_data_parallel: bool = False,
) -> int:
    """State slots of padding rows: one for each draft length that a step can have.

    Args:
      draft_lengths: largest batch -> draft length used up to it; above the largest,
        none are drafted. None: one length for every batch.
      max_num_seqs: requests of one step.
      accepts_variable_lengths: whether a step without drafts can happen at any time.
      attention_data_parallel: one slot more for a rank's placeholder request.
    """
    count = 1
    if draft_lengths is not None:
        lengths, reached = set(), 0
        for batch in sorted(draft_lengths):
            if reached < max_num_seqs:
                lengths.add(draft_lengths[batch])
            reached = batch
        if reached < max_num_seqs or accepts_variable_lengths:
            lengths.add(0)
        count = len(lengths)
    return count + int(attention_data_parallel)


def num_state_slots(
    *,
    max_num_seqs: int,
    max_tokens: int,
    pipeline_parallel: int = 1,
    num_spare_slots: int = 1,
    num_rules: int = 0,
    snapshot_interval: int = 0,
    max_draft_tokens: int = 0,
    enable_prefix_caching: bool = True,
    manager: str = "separate",
    dry_run: bool = False,
) -> int:
    """State slots of a pool: live, spare and snapshots together.

    `dry_run` leaves the spare slots out, as the published estimate before the real
    allocation does.
    """
    _check_manager(manager)
    live = max_num_seqs * pipeline_parallel
    interval = snapshot_interval if enable_prefix_caching else 0
    periodic = max_tokens // interval if interval > 0 else 0
    if dry_run:
        return live + periodic
    if manager == "unified":
        return live + 1 + max_draft_tokens + periodic
    fixed = live * num_rules if enable_prefix_caching else 0
    return live + num_spare_slots + fixed + periodic


def num_snapshots(
    *,
    max_num_seqs: int,
    max_tokens: int,
    pipeline_parallel: int = 1,
    num_rules: int = 0,
    snapshot_interval: int = 0,
) -> int:
    """Snapshots that so many cached tokens call for."""
    periodic = max_tokens // snapshot_interval if snapshot_interval > 0 else 0
    return max_num_seqs * pipeline_parallel * num_rules + periodic


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedPool:
    """Sizes of the pool that holds blocks and states together."""

    num_tokens: int
    num_blocks: int
    num_state_slots: int


def unified_pool(
    *,
    budget: int,
    kv_bytes_per_token: int,
    state_bytes: int,
    max_num_seqs: int,
    block_size: int,
    max_seq_len: int,
    max_tokens: int | None = None,
    pipeline_parallel: int = 1,
    snapshot_interval: int = 0,
) -> UnifiedPool:
    """What a budget holds at run time, with every sharing rounded down.

    The estimate of `affine_memory` rounds a token's share of a snapshot up, the
    published run-time rule down; this is the latter.
    """
    live = max_num_seqs * pipeline_parallel
    slope = kv_bytes_per_token
    if snapshot_interval > 0:
        slope += state_bytes // snapshot_interval
    if slope:
        tokens = max(0, (budget - live * state_bytes) // slope)
        tokens = tokens if max_tokens is None else min(tokens, max_tokens)
    else:
        tokens = max_seq_len * live if max_tokens is None else max_tokens
    return UnifiedPool(
        num_tokens=tokens,
        num_blocks=tokens // block_size,
        num_state_slots=num_state_slots(
            max_num_seqs=max_num_seqs,
            max_tokens=tokens,
            pipeline_parallel=pipeline_parallel,
            snapshot_interval=snapshot_interval,
            manager="unified",
        ),
    )


def available_tokens(
    attention_tokens: int,
    free_state_slots: int,
    snapshot_interval: int,
    *,
    has_states: bool,
    short_prompt: int | None = None,
) -> int:
    """Tokens that can be admitted: what attention holds and snapshots allow.

    A rank without recurrent layers has its full attention capacity. One free slot is
    the live state; the others hold a snapshot each. The published rule therefore gives
    0 with one free slot; with `short_prompt`, the tokens of a prompt below the
    interval, which files nothing, that one slot suffices.
    """
    if not has_states or snapshot_interval <= 0:
        return attention_tokens
    most = max(0, (free_state_slots - 1) * snapshot_interval)
    if short_prompt is not None and free_state_slots >= 1:
        if short_prompt < snapshot_interval:
            most = max(most, short_prompt)
    return min(attention_tokens, most)


def typical_step(
    avg_seq_len: int, num_rules: int, num_sequences: int, num_spare_slots: int
) -> list[int]:
    """Tokens of every state entry of a typical step: what pools are balanced for.

    A sequence is cut evenly by its fixed snapshots; spare entries are empty.
    """
    pieces = 1 + num_rules
    cut = [avg_seq_len // pieces + (at < avg_seq_len % pieces) for at in range(pieces)]
    return cut * num_sequences + [0] * num_spare_slots


def average_length(avg_seq_len: int | None, max_seq_len: int) -> int:
    """The average length that pools are balanced for: half the longest by default."""
    if avg_seq_len is not None:
        return check_count("avg_seq_len", avg_seq_len, low=1, high=max_seq_len)
    half = max(max_seq_len // 2, 1)
    warnings.warn(
        f"avg_seq_len is not set: pools are balanced for {half} tokens, half of "
        f"max_seq_len={max_seq_len}; set it to the average of your requests",
        stacklevel=2,
    )
    return half


def check_quota(quota: int, memory: AffineMemory, max_num_seqs: int) -> None:
    """Raises ValueError if a budget does not hold the states that must be there."""
    if quota < memory.intercept:
        raise ValueError(
            f"the cache budget of {quota} bytes is below the {memory.intercept} that "
            f"the states of max_num_seqs={max_num_seqs} requests take: raise it to at "
            f"least {memory.intercept} or lower max_num_seqs"
        )


def split_layers(layers: Sequence, pipeline_parallel: int) -> list[list]:
    """The layers of each pipeline rank: as even as can be, earlier ranks more.

    Raises:
      ValueError: if a rank would have none.
    """
    ranks = check_count("pipeline_parallel", pipeline_parallel, low=1)
    if len(layers) < ranks:
        raise ValueError(
            f"pipeline_parallel={ranks} must be at most the {len(layers)} layers"
        )
    size, more = divmod(len(layers), ranks)
    ends = [size * rank + min(rank, more) for rank in range(ranks + 1)]
    return [list(layers[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
