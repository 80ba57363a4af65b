"""What a replay carries of the hybrid cache, and what it notes of each request.

Shape letters: N requests (padded), R rows of the request table and of the cache,
L tokens of the longest request, rounded up.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.cache.hybrid_types import HybridCache, HybridConfig, empty_cache
from jaxsched.cache.prefix import MissReason
from jaxsched.core.config import NO_ID

Array = jax.Array


class CacheColumn(enum.IntEnum):
    """Columns of the notes on requests, i32."""

    NUM_CACHED_TOKENS = 0  # at its first admission, as the four that follow
    NUM_KV_MATCHED_TOKENS = 1
    NUM_STATE_MATCHED_TOKENS = 2
    MISS_REASON = 3  # a MissReason
    NUM_SEEN_TOKENS = 4  # of the prompt, ever computed and reusable
    BRANCH_POINT = 5  # asked for because it leaves a stored sequence there; or 0
    GHOST_POINT = 6  # asked for because a state there was evicted; or 0
    ANSWER_SNAPSHOT = 7  # where the state at the end of its answer was filed; or 0
    NUM_PREEMPTIONS = 8
    NUM_RECOMPUTED_TOKENS = 9  # computed before it was preempted, and again after
    NUM_RESUMED_OUTPUTS = 10  # output tokens it had when it was last preempted
    NUM_REACHED_TOKENS = 11  # tokens it had computed then


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheRun:
    """The cache in a replay. Rows of the cache stay put while the table is sorted."""

    tables: HybridCache
    tokens: Array  # i32[R, L]  by rows of the cache: prompt and answer
    row: Array  # i32[R]  of the cache, by rows of the table
    learned: Array  # i32[R, 2]  branch and ghost points by rows of the table, or NO_ID
    notes: Array  # i32[N, CacheColumn]
    is_closed: Array  # bool[]  nobody enters until a row ends: one was preempted
    num_filed_snapshots: Array  # i32[]  states that were copied into a slot

    def replace(self, **fields) -> "CacheRun":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)

    def note(self, request: Array, column: CacheColumn) -> Array:
        """A column of the notes on i32[...] requests; i32[...]."""
        return self.notes[request, column]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSetup:
    """Static choices of the cache in a replay; hashable.

    Args:
      is_used: False: pools are unlimited and nothing is reused, so there is no need
        to keep any book.
      hybrid: the tables.
      buckets: widths in blocks, ascending, at which prompts are looked up; the last
        one is the width of a row.
      grows: rows take blocks as they come to need them, and preempt each other.
    """

    is_used: bool
    hybrid: HybridConfig
    buckets: tuple[int, ...]
    grows: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheSettings:
    """Numbers of the cache that can differ without compiling again."""

    reads: Array  # bool[]  prompts reuse what is there, and publish
    learns_branches: Array  # bool[]
    files_answers: Array  # bool[]
    decode_interval: Array  # i32[]  tokens between points that answers file at; 0: none
    whole_batches: Array  # bool[]  requests enter only when nothing runs


def cache_settings(
    *,
    reads: bool,
    learns_branches: bool,
    files_answers: bool,
    decode_interval: int,
    whole_batches: bool,
) -> CacheSettings:
    """`CacheSettings` of Python values."""
    return CacheSettings(
        reads=jnp.asarray(reads),
        learns_branches=jnp.asarray(learns_branches and reads),
        files_answers=jnp.asarray(files_answers and reads),
        decode_interval=jnp.int32(decode_interval if reads else 0),
        whole_batches=jnp.asarray(whole_batches),
    )


def first_run(
    setup: CacheSetup,
    *,
    num_rows: int,
    num_requests: int,
    num_blocks: int,
    num_snapshots: int,
) -> CacheRun:
    """An empty cache.

    Args:
      setup: static.
      num_rows: of the request table.
      num_requests: N, padding included.
      num_blocks, num_snapshots: in use, at most those of the setup.
    """
    hybrid = setup.hybrid
    length = hybrid.blocks_per_row * hybrid.block_size
    notes = np.zeros((num_requests, len(CacheColumn)), np.int32)
    # Where nobody is looked up, with prefix caching off, nothing is there.
    notes[:, CacheColumn.MISS_REASON] = MissReason.NO_PREFIX
    return CacheRun(
        tables=empty_cache(hybrid, num_blocks=num_blocks, num_snapshots=num_snapshots),
        tokens=jnp.zeros((hybrid.num_rows, length), jnp.int32),
        row=jnp.zeros(num_rows, jnp.int32),
        learned=jnp.full((num_rows, 2), NO_ID, jnp.int32),
        notes=jnp.asarray(notes),
        is_closed=jnp.asarray(False),
        num_filed_snapshots=jnp.int32(0),
    )
