"""The values that a replay carries through its compiled loop.

Shape letters: N requests (padded), R rows of the request table, P listed snapshot
points of all requests, L step entries, K chunk entries, E emitted points of a chunk.
"""

import dataclasses
import enum

import jax

from jaxsched.core.plan import Budget
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.snapshots import SnapshotRules
from jaxsched.simulation.cache_state import CacheRun, CacheSettings
from jaxsched.simulation.cache_tokens import TokenSpans
from jaxsched.simulation.replay_clock import CostLine, Ticks

Array = jax.Array


class FinishReason(enum.IntEnum):
    """How a request ended; 0 means that it has not."""

    RUNNING = 0
    LENGTH = 1  # it has all its output tokens
    CANCELLED = 2  # its client went away
    REFUSED = 3  # it could never be scheduled, so it was not let in


class StepColumn(enum.IntEnum):
    """Columns of the step log, u32."""

    START_HI = 0
    START_LO = 1
    DURATION_HI = 2
    DURATION_LO = 3
    REPEATS = 4  # equal steps that the entry stands for
    PREFILL_TOKENS = 5  # of each of them
    DECODE_TOKENS = 6  # of each of them, drafts included
    NUM_SEQS = 7


class ChunkColumn(enum.IntEnum):
    """Columns of the chunk log, i32; behind them what was filed of the 1 + E points."""

    STEP = 0  # index into the step log
    REQUEST = 1
    START = 2
    END = 3
    SNAPSHOT_POINT = 4
    EMIT_POINTS = 5


class ResultColumn(enum.IntEnum):
    """Columns of the results, u32."""

    ADMITTED_HI = 0
    ADMITTED_LO = 1
    FIRST_TOKEN_HI = 2
    FIRST_TOKEN_LO = 3
    FINISH_HI = 4
    FINISH_LO = 5
    NUM_OUTPUT_TOKENS = 6
    NUM_COMPUTED_TOKENS = 7
    FINISH_REASON = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
    """The requests, by arrival; what the loop reads and never writes.

    Padding requests arrive NEVER and stand last in `order`.
    """

    num_prompt_tokens: Array  # i32[N]
    max_new_tokens: Array  # i32[N]
    lora_id: Array  # i32[N]
    priority: Array  # i32[N]
    arrival_ms: Array  # i32[N]  rounded down, held at MAX_COUNT
    arrival: Ticks  # u32[N]
    deadline: Ticks  # u32[N]  when it is given up; sequential: after its arrival
    order: Array  # i32[N]  requests by urgency: priority, then arrival
    rank: Array  # i32[N]  place in `order`
    first_point: Array  # i32[N]  where its points begin in `points`
    num_points: Array  # i32[N]
    points: Array  # i32[P]
    spans: TokenSpans


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """Numbers that can differ from run to run without compiling again."""

    budget: Budget
    rules: SnapshotRules
    cost: CostLine
    cache: CacheSettings
    num_draft_tokens: Array  # i32[]  proposed for every decode
    num_accepted_tokens: Array  # i32[]  of the kept ones, confirmed in every step
    sequential: Array  # bool[]  one request after the other
    num_requests: Array  # i32[]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplayState:
    """Where a replay stands; `table.request_id` is an index into `Arrivals`."""

    clock: Ticks  # u32[]
    table: RequestTable  # rows by urgency, the living ones first
    admitted: Ticks  # u32[R]
    first_token: Ticks  # u32[R]  NEVER before there is one
    deadline: Ticks  # u32[R]
    left_queue: Array  # bool[N]  admitted, given up or refused
    num_arrived: Array  # i32[]
    head: Array  # i32[]  everything before it in `order` has left the queue
    next_deadline: Ticks  # u32[]  of the rows and the queue
    results: Array  # u32[N, ResultColumn]  of the requests that have ended
    num_ended: Array  # i32[]
    steps: Array  # u32[L, StepColumn]
    num_step_entries: Array  # i32[]
    chunks: Array  # i32[K, 5 + E + 1 + E]
    num_chunk_entries: Array  # i32[]
    stalled: Array  # bool[]  nothing can run and nothing more will come
    cache: CacheRun

    def replace(self, **fields) -> "ReplayState":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)
