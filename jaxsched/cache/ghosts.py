"""What the cache learns from hits, of states that it has and of states that it had.

Every entry, ghosts included, remembers when it was last used. From the hits, real ones
and those that a ghost would have given, come reuse counts for classes of entries at
ages, an age being measured in the mean turn gap of the entry's own session (*tempo*).
From reuse and exposure comes a hazard, and from the hazard the *index*: the best reuse
rate that one can buy by holding an entry of this class and age a little longer (the
Gittins form of a stopping problem). Without ghosts only the survivors would be counted,
which hides just what was evicted too early.

Shape letters: E entries, C classes (13), T age bins (30), A admitted rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

from jaxsched.cache.states import SnapshotKind, StateTable

Array = jax.Array

NUM_CLASSES = 13
NUM_BINS = 30
NUM_TEMPO_KINDS = 4

_START_GAP_S = 150.0
_START_GAP_WEIGHT = 10.0
_GAP_OFFSET_S = 3.0
_MAX_GAPS = 6
_TEMPO_WEIGHT = 3.0  # how many gaps the mean of the kind is worth
_SHARED_WEIGHT = 20.0  # reuses that the prior of the shared law is worth
_CLASS_WEIGHT = 8.0  # the same for a class's multiple of it
_BIN_WEIGHT = 8.0  # the same for a bin of a class
_RETURNS = 0.7  # prior: this many come back, at log-normal gaps
_UNIT_EDGE = 0.04  # first age edge, in gaps
_SECOND_EDGE = 6.0  # first age edge of the plain histogram, in seconds
_LEAST_HAZARD = 1e-3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReuseStats:
    """Counts that only grow; a few kilobytes."""

    reuse: Array  # f32[C, T]  (would-be) hits at an age in gaps
    exposure: Array  # f32[C, T]  gaps spent at that age by entries hit or dropped
    sum_log_gap: Array  # f32[4]  over the kinds: logs of (gap + 3 s)
    num_gaps: Array  # f32[4]
    age_reuse: Array  # f32[T]  hits of leaves at an age in seconds
    age_exposure: Array  # f32[T]  seconds, until hit or evicted
    inflation: Array  # f32[]  the GreedyDual clock


def empty_stats() -> ReuseStats:
    """Nothing learned."""

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.float32)

    return ReuseStats(
        reuse=zeros(NUM_CLASSES, NUM_BINS),
        exposure=zeros(NUM_CLASSES, NUM_BINS),
        sum_log_gap=zeros(NUM_TEMPO_KINDS),
        num_gaps=zeros(NUM_TEMPO_KINDS),
        age_reuse=zeros(NUM_BINS),
        age_exposure=zeros(NUM_BINS),
        inflation=zeros(),
    )


def edges(first: float) -> np.ndarray:
    """Lower edges of the bins, f32[T]: 0, then three to an octave."""
    steps = first * 2.0 ** (np.arange(NUM_BINS - 1) / 3)
    return np.concatenate([[0.0], steps]).astype(np.float32)


def bin_place(age: Array, first: float) -> Array:
    """Where an age lies among the bins, f32: 2.5 is the middle of bin 2."""
    behind = 1 + 3 * jnp.log2(jnp.maximum(age, first) / first)
    return jnp.clip(jnp.where(age < first, age / first, behind), 0, NUM_BINS - 1e-3)


def bin_of(age: Array, first: float) -> Array:
    """The bin of an age; i32."""
    return jnp.clip(jnp.floor(bin_place(age, first)), 0, NUM_BINS - 1).astype(jnp.int32)


def exposures(age: Array, first: float) -> Array:
    """Time that something of an age has spent in each bin; f32[N, T] of f32[N]."""
    low = jnp.asarray(edges(first))
    high = jnp.append(low[1:], jnp.float32(jnp.inf))
    return jnp.clip(age[:, None] - low[None, :], 0, (high - low)[None, :])


def seconds_since(now: Array, then: Array) -> Array:
    """Seconds between two i32 millisecond clocks, never negative; f32."""
    return jnp.maximum(now - then, 0).astype(jnp.float32) * jnp.float32(1e-3)


def classes(states: StateTable) -> Array:
    """Class of each entry, i32[E]: its kind, and its turns or its hits."""
    answers = jnp.minimum(states.num_turns, 3)
    hits = states.num_hits
    few = jnp.minimum(hits, 1)
    forks = jnp.where(hits < 2, hits, jnp.where(hits < 4, 2, 3))
    return jnp.select(
        [states.kind == kind for kind in SnapshotKind],
        [answers, jnp.full_like(hits, 4), 5 + forks, 9 + few, 11 + few],
    )


def tempo_kind(kind: Array) -> Array:
    """Row of the per-kind mean gaps; consumed answers keep the tempo of answers."""
    return jnp.maximum(kind - 1, 0)


def typical_gap(stats: ReuseStats, states: StateTable) -> Array:
    """Mean gap of each entry's session, shrunk to that of its kind; f32[E] seconds."""
    start = math.log(_START_GAP_S)
    total = stats.sum_log_gap + jnp.float32(start * _START_GAP_WEIGHT)
    of_kind = total / (stats.num_gaps + _START_GAP_WEIGHT)
    own = states.num_gaps.astype(jnp.float32)
    mean = _TEMPO_WEIGHT * of_kind[tempo_kind(states.kind)] + states.sum_log_gap
    return jnp.exp(mean / (_TEMPO_WEIGHT + own))


def record_hits(
    stats: ReuseStats, states: StateTable, past: Array, leaf_hit: Array, now: Array
) -> ReuseStats:
    """Counts what the prompts just admitted would have reused.

    Args:
      stats: so far.
      states: before the hits are written into it.
      past: i32[A], deepest entry on each prompt's path, ghosts included, or NO_ID.
      leaf_hit: i32[A], the leaf whose state is really reused, or NO_ID.
      now: i32[], milliseconds.
    """
    gaps = typical_gap(stats, states)
    known = past >= 0
    at = jnp.maximum(past, 0)
    gap = seconds_since(now, states.used_at[at])
    age = gap / gaps[at]
    group = jnp.where(known, classes(states)[at], NUM_CLASSES)
    kind = jnp.where(known, tempo_kind(states.kind[at]), NUM_TEMPO_KINDS)
    spent = exposures(age, _UNIT_EDGE)
    leaf = jnp.maximum(leaf_hit, 0)
    rest = seconds_since(now, states.used_at[leaf])
    rest_bin = jnp.where(leaf_hit >= 0, bin_of(rest, _SECOND_EDGE), NUM_BINS)
    rest_spent = jnp.where((leaf_hit >= 0)[:, None], exposures(rest, _SECOND_EDGE), 0)
    log_gap = jnp.log(gap + _GAP_OFFSET_S)
    return dataclasses.replace(
        stats,
        reuse=stats.reuse.at[group, bin_of(age, _UNIT_EDGE)].add(1.0, mode="drop"),
        exposure=stats.exposure.at[group].add(spent, mode="drop"),
        sum_log_gap=stats.sum_log_gap.at[kind].add(log_gap, mode="drop"),
        num_gaps=stats.num_gaps.at[kind].add(1.0, mode="drop"),
        age_reuse=stats.age_reuse.at[rest_bin].add(1.0, mode="drop"),
        age_exposure=stats.age_exposure + jnp.sum(rest_spent, axis=0),
    )


def used_entries(states: StateTable, past: Array, now: Array) -> StateTable:
    """Writes the hits of `record_hits` into the entries."""
    size = states.num_entries
    at = jnp.maximum(past, 0)
    place = jnp.where(past >= 0, past, size)
    log_gap = jnp.log(seconds_since(now, states.used_at[at]) + _GAP_OFFSET_S)
    full = states.num_gaps[at] >= _MAX_GAPS
    kept = jnp.where(full, (_MAX_GAPS - 1) / _MAX_GAPS, 1.0) * states.sum_log_gap[at]
    kind = states.kind[at]
    answered = kind <= SnapshotKind.CONSUMED_ANSWER  # then: consumed, then: a fork
    return states.replace(
        kind=states.kind.at[place].set(
            jnp.where(answered, kind + 1, kind), mode="drop"
        ),
        used_at=states.used_at.at[place].set(now, mode="drop"),
        num_hits=states.num_hits.at[place].add(1, mode="drop"),
        sum_log_gap=states.sum_log_gap.at[place].set(kept + log_gap, mode="drop"),
        num_gaps=states.num_gaps.at[place].set(
            jnp.minimum(states.num_gaps[at] + 1, _MAX_GAPS), mode="drop"
        ),
    )


def record_drops(
    stats: ReuseStats, states: StateTable, dropped: Array, now: Array
) -> ReuseStats:
    """Keeps the exposure of ghosts that are forgotten; their end is never seen."""
    age = seconds_since(now, states.used_at) / typical_gap(stats, states)
    spent = jnp.where(dropped[:, None], exposures(age, _UNIT_EDGE), 0)
    return dataclasses.replace(
        stats, exposure=stats.exposure.at[classes(states)].add(spent)
    )


def record_evictions(
    stats: ReuseStats, states: StateTable, evicted: Array, now: Array
) -> ReuseStats:
    """Keeps the seconds that evicted states had been waiting."""
    age = seconds_since(now, states.used_at)
    spent = jnp.where(evicted[:, None], exposures(age, _SECOND_EDGE), 0)
    return dataclasses.replace(
        stats, age_exposure=stats.age_exposure + jnp.sum(spent, axis=0)
    )


def reuse_rates(stats: ReuseStats, states: StateTable, now: Array) -> Array:
    """Expected reuses a second of each entry, the best that holding it buys; f32[E]."""
    gaps = typical_gap(stats, states)
    age = seconds_since(now, states.used_at) / gaps
    group = classes(states)
    alive = jnp.where((states.depth > 0)[:, None], exposures(age, _UNIT_EDGE), 0)
    exposure = stats.exposure.at[group].add(alive)
    table = jnp.log(_index(_hazards(stats.reuse, exposure), edges(_UNIT_EDGE)))
    return jnp.exp(_interpolate(table, group, age, _UNIT_EDGE)) / gaps


def leaf_rates(stats: ReuseStats, states: StateTable, leaf: Array, now: Array) -> Array:
    """The same from one histogram of plain ages, for leaves; f32[E] a second."""
    age = seconds_since(now, states.used_at)
    alive = jnp.where(leaf[:, None], exposures(age, _SECOND_EDGE), 0)
    low = edges(_SECOND_EDGE)
    prior = jnp.asarray(0.5 / (_middles(low) + 60.0), jnp.float32)
    exposure = stats.age_exposure + jnp.sum(alive, axis=0)
    hazard = (stats.age_reuse + _BIN_WEIGHT) / (exposure + _BIN_WEIGHT / prior)
    table = jnp.log(_index(hazard[None, :], low))
    return jnp.exp(_interpolate(table, jnp.zeros_like(states.kind), age, _SECOND_EDGE))


def _middles(low: np.ndarray) -> np.ndarray:
    """Middles of the bins, f32[T]: geometric, of the first one arithmetic."""
    high = np.append(low[1:], low[-1] * 2 ** (1 / 3))
    return np.append(high[:1] / 2, np.sqrt(low[1:] * high[1:])).astype(np.float32)


def _widths(low: np.ndarray) -> np.ndarray:
    return np.diff(np.append(low, low[-1] * 2 ** (1 / 3))).astype(np.float32)


def _hazards(reuse: Array, exposure: Array) -> Array:
    """Reuses a gap of each class at each age, f32[C, T], shrunk to a shared law."""
    middle = jnp.asarray(_middles(edges(_UNIT_EDGE)))
    z = jnp.log(middle)
    prior = _RETURNS * norm.pdf(z) / (middle * (1 - _RETURNS * norm.cdf(z)))
    prior = jnp.maximum(prior, _LEAST_HAZARD)
    weight = jnp.float32(_SHARED_WEIGHT)
    shared = (jnp.sum(reuse, axis=0) + weight) / (
        jnp.sum(exposure, axis=0) + weight / prior
    )
    padded = jnp.pad(jnp.log(shared), 1, mode="edge")
    shared = jnp.exp(padded[:-2] / 4 + padded[1:-1] / 2 + padded[2:] / 4)
    expected = shared[None, :] * exposure
    multiple = (jnp.sum(reuse, axis=1) + _CLASS_WEIGHT) / (
        jnp.sum(expected, axis=1) + _CLASS_WEIGHT
    )
    expected = expected * multiple[:, None]
    scale = shared[None, :] * multiple[:, None]
    return scale * (reuse + _BIN_WEIGHT) / (expected + _BIN_WEIGHT)


def _index(hazard: Array, low: np.ndarray) -> Array:
    """Best ratio of reuses to time over all stopping ages; f32[C, T] of f32[C, T]."""
    passed = hazard * jnp.asarray(_widths(low))[None, :]
    before = jnp.cumsum(passed, axis=1) - passed
    survived = jnp.exp(before[:, :, None] - before[:, None, :])  # [C, from, bin]
    ahead = jnp.asarray(np.triu(np.ones((NUM_BINS, NUM_BINS), np.float32)))
    reused = survived * (1 - jnp.exp(-passed))[:, None, :] * ahead[None]
    time = jnp.cumsum(reused / hazard[:, None, :], axis=2)
    ratio = jnp.cumsum(reused, axis=2) / jnp.maximum(time, 1e-30)
    return jnp.max(jnp.where(ahead[None] > 0, ratio, 0), axis=2)


def _interpolate(table: Array, group: Array, age: Array, first: float) -> Array:
    """Entries of f32[C, T] between the middles of bins; f32[E]."""
    place = jnp.clip(bin_place(age, first) - 0.5, 0, NUM_BINS - 1)
    below = jnp.floor(place)
    share = place - below
    left = below.astype(jnp.int32)
    right = jnp.minimum(left + 1, NUM_BINS - 1)
    return table[group, left] * (1 - share) + table[group, right] * share
