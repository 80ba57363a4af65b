"""`replay`: a workload through the scheduler, step by step, on a simulated clock."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import jax
import numpy as np

from jaxsched.core.config import ChunkingPolicy, PlanError, Reason
from jaxsched.scheduling.scheduler import schedule
from jaxsched.simulation.cache_setup import CachePlan, cache_plan
from jaxsched.simulation.cache_state import CacheColumn, CacheRun
from jaxsched.simulation.replay_arrays import (
    ArrivalTimes,
    arrivals_arrays,
    first_state,
    run_settings,
    window_size,
)
from jaxsched.simulation.replay_clock import NEVER_PS, picoseconds
from jaxsched.simulation.replay_config import ReplayConfig, ReplayError
from jaxsched.simulation.replay_limits import check_ranges
from jaxsched.simulation.replay_loop import prepare, run_steps
from jaxsched.simulation.replay_state import (
    ChunkColumn,
    FinishReason,
    ReplayState,
    ResultColumn,
    Settings,
    StepColumn,
)
from jaxsched.simulation.workloads import Workload

_PS_PER_NS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What happened. Times are picoseconds since the first arrival, NEVER_PS: not.

    Shape letters: N requests of the workload, in its order, L step entries, K chunks,
    E emitted points of a chunk.
    """

    workload: Workload
    config: ReplayConfig
    arrival: np.ndarray  # u64[N]
    admitted: np.ndarray  # u64[N]  it entered the request table
    first_token: np.ndarray  # u64[N]
    finish: np.ndarray  # u64[N]
    num_output_tokens: np.ndarray  # i64[N]
    num_computed_tokens: np.ndarray  # i64[N]
    finish_reason: np.ndarray  # i64[N]  a FinishReason
    step_start: np.ndarray  # u64[L]
    step_duration: np.ndarray  # u64[L]  of all its repeats
    step_repeats: np.ndarray  # i64[L]
    step_prefill_tokens: np.ndarray  # i64[L]  of each repeat
    step_decode_tokens: np.ndarray  # i64[L]  of each repeat
    step_num_seqs: np.ndarray  # i64[L]
    chunk_step: np.ndarray  # i64[K]  index into the step entries
    chunk_request: np.ndarray  # i64[K]
    chunk_start: np.ndarray  # i64[K]  tokens
    chunk_end: np.ndarray  # i64[K]
    chunk_points: np.ndarray  # i64[K, 1 + E]  points landed on, NO_ID padded
    chunk_filed: np.ndarray  # i64[K, F]  of those, the ones the cache has now
    passed_request: np.ndarray  # i64[P]  states that decodes left behind: whose
    passed_point: np.ndarray  # i64[P]  and at which position of its answer
    notes: np.ndarray  # i64[N, CacheColumn]
    num_evicted_blocks: int
    num_evicted_snapshots: int
    num_filed_snapshots: int  # copied into a slot; those known before are not

    def note(self, column: CacheColumn) -> np.ndarray:
        """A column of the notes, i64[N]."""
        return self.notes[:, column]


def replay(
    workload: Workload,
    config: ReplayConfig,
    progress: Callable[[int], None] | None = None,
    plan: CachePlan | None = None,
) -> Replay:
    """Runs every request of a workload through the scheduler.

    Requests enter the request table in first-come order (more urgent ones first) as
    rows become free; each step publishes snapshot points, plans, and advances. One
    compilation serves every workload of a bucket and every budget, interval and cost.

    Args:
      workload: what arrives.
      config: the settings.
      progress: called now and then with the number of requests that have ended.
      plan: sizes of the tables; default those that `planned_sizes` finds. Larger ones
        change nothing but the time that it takes.

    Raises:
      ReplayError: if a count or a time cannot be represented, or if requests wait
        for what can never come.
    """
    times = _arrival_times(workload, config)
    refused = _refused(workload, config)
    entering = np.flatnonzero(~refused)
    check_ranges(workload, config, times, entering)
    plan = plan or cache_plan(workload, config, entering)
    arrivals = arrivals_arrays(workload, config, times, entering, plan)
    settings = run_settings(config, len(entering))
    state = first_state(config, arrivals, workload, plan)
    window = window_size(workload, config, arrivals, plan.num_rows)
    steps, chunks = [], []
    while True:
        state = run_steps(
            arrivals,
            settings,
            state,
            config=config.scheduler(),
            window=window,
            setup=plan.setup,
        )
        before = sum(len(part) for part in steps)
        logs = jax.device_get((state.steps, state.chunks))
        counts = jax.device_get((state.num_step_entries, state.num_chunk_entries))
        steps.append(logs[0][: counts[0]])
        chunks.append(logs[1][: counts[1]].astype(np.int64))
        chunks[-1][:, ChunkColumn.STEP] += before
        ended = int(state.num_ended)
        if progress:
            progress(ended + int(refused.sum()))
        if bool(state.stalled):
            raise ReplayError(_why_stalled(workload, config, settings, state, entering))
        if ended == len(entering):
            break
        state = state.replace(
            num_step_entries=state.num_step_entries * 0,
            num_chunk_entries=state.num_chunk_entries * 0,
        )
    results = np.asarray(state.results)[: len(entering)]
    return _collect(
        workload,
        config,
        times,
        entering,
        results,
        np.concatenate(steps),
        chunks,
        state.cache,
        plan,
    )


def planned_sizes(workload: Workload, config: ReplayConfig) -> CachePlan:
    """Sizes of the tables of a replay, made once all that it is told is checked.

    Raises:
      ReplayError: as `replay`.
    """
    entering = np.flatnonzero(~_refused(workload, config))
    check_ranges(workload, config, _arrival_times(workload, config), entering)
    return cache_plan(workload, config, entering)


def _arrival_times(workload: Workload, config: ReplayConfig) -> ArrivalTimes:
    """Arrivals and patience in picoseconds, the first arrival at 0."""
    first = workload.requests[0].arrival_ns
    scale = Fraction(repr(float(config.rate_scale)))
    arrival, patience = [], []
    for request in workload.requests:
        since_first = (request.arrival_ns - first) * _PS_PER_NS
        arrival.append(0 if config.sequential else round(since_first / scale))
        given_up = request.cancel_at_ns
        waits = None
        if given_up is not None:
            # A client's patience does not depend on how fast others arrive.
            waits = (given_up - request.arrival_ns) * _PS_PER_NS
        patience.append(waits)
    return ArrivalTimes(arrival, patience)


def _refused(workload: Workload, config: ReplayConfig) -> np.ndarray:
    """Prompts that no step can hold, or the pool never; bool[N]."""
    limits = (config.max_num_batched_tokens, config.max_context_length)
    most = min((limit for limit in limits if limit), default=None)
    whole = config.scheduler().chunking_policy == ChunkingPolicy.NONE
    lengths = np.array([r.num_prompt_tokens for r in workload.requests])
    refused = np.zeros(len(lengths), bool)
    if config.kv_blocks:
        outputs = np.array([r.max_new_tokens for r in workload.requests])
        held = lengths + outputs + config.draft_tokens
        refused |= held > config.kv_blocks * config.block_size
    if whole and most is not None:
        refused |= lengths > most
    return refused


def _why_stalled(
    workload: Workload,
    config: ReplayConfig,
    settings: Settings,
    state: ReplayState,
    entering: np.ndarray,
) -> str:
    table = prepare(settings, state.table, state.cache)
    plan = schedule(table, settings.budget, config.scheduler())
    error = PlanError(int(plan.error))
    if error:
        return f"nothing can run: {error.message}"
    rows = np.flatnonzero(np.asarray(table.request_id) >= 0)
    if not len(rows):
        waits = np.flatnonzero(~np.asarray(state.left_queue)[: len(entering)])
        request = workload.requests[entering[waits[0]]]
        return (
            f"nothing can run: request {request.request_id!r} ({request.where}) waits "
            f"for room in an empty pool: raise kv_blocks={config.kv_blocks}"
        )
    row = int(rows[0])
    request = workload.requests[entering[int(table.request_id[row])]]
    reason = Reason(int(plan.reason[row])).name
    return (
        f"nothing can run: request {request.request_id!r} ({request.where}) stands at "
        f"token {int(table.num_computed_tokens[row])} of {request.num_prompt_tokens} "
        f"with reason {reason}: raise max_num_batched_tokens, or lower chunk_unit or "
        "draft_tokens"
    )


def _collect(
    workload: Workload,
    config: ReplayConfig,
    times: ArrivalTimes,
    entering: np.ndarray,
    results: np.ndarray,
    steps: np.ndarray,
    chunks: list[np.ndarray],
    cache: CacheRun,
    plan: CachePlan,
) -> Replay:
    size = len(workload.requests)

    def times_of(hi: ResultColumn, lo: ResultColumn) -> np.ndarray:
        found = np.full(size, NEVER_PS, np.uint64)
        found[entering] = picoseconds(results[:, hi], results[:, lo])
        return found

    def counts_of(column: ResultColumn, otherwise: int) -> np.ndarray:
        found = np.full(size, otherwise, np.int64)
        found[entering] = results[:, column]
        return found

    finish = times_of(ResultColumn.FINISH_HI, ResultColumn.FINISH_LO)
    arrival = np.array(times.arrival, np.uint64)
    if config.sequential and len(entering):
        arrival[entering[1:]] = finish[entering[:-1]]
    entries = np.concatenate(chunks)
    passed = entries[entries[:, ChunkColumn.START] < 0]
    entries = entries[entries[:, ChunkColumn.START] >= 0]
    notes = np.zeros((size, len(CacheColumn)), np.int64)
    notes[entering] = np.asarray(cache.notes)[: len(entering)]
    filed = plan.setup.hybrid.num_points
    counts = steps.astype(np.int64)
    return Replay(
        workload=workload,
        config=config,
        arrival=arrival,
        admitted=times_of(ResultColumn.ADMITTED_HI, ResultColumn.ADMITTED_LO),
        first_token=times_of(ResultColumn.FIRST_TOKEN_HI, ResultColumn.FIRST_TOKEN_LO),
        finish=finish,
        num_output_tokens=counts_of(ResultColumn.NUM_OUTPUT_TOKENS, 0),
        num_computed_tokens=counts_of(ResultColumn.NUM_COMPUTED_TOKENS, 0),
        finish_reason=counts_of(ResultColumn.FINISH_REASON, FinishReason.REFUSED),
        step_start=picoseconds(
            steps[:, StepColumn.START_HI], steps[:, StepColumn.START_LO]
        ),
        step_duration=picoseconds(
            steps[:, StepColumn.DURATION_HI], steps[:, StepColumn.DURATION_LO]
        ),
        step_repeats=counts[:, StepColumn.REPEATS],
        step_prefill_tokens=counts[:, StepColumn.PREFILL_TOKENS],
        step_decode_tokens=counts[:, StepColumn.DECODE_TOKENS],
        step_num_seqs=counts[:, StepColumn.NUM_SEQS],
        chunk_step=entries[:, ChunkColumn.STEP],
        chunk_request=entering[entries[:, ChunkColumn.REQUEST]],
        chunk_start=entries[:, ChunkColumn.START],
        chunk_end=entries[:, ChunkColumn.END],
        chunk_points=entries[:, ChunkColumn.SNAPSHOT_POINT : -filed],
        chunk_filed=entries[:, -filed:],
        passed_request=entering[passed[:, ChunkColumn.REQUEST]],
        passed_point=passed[:, -filed],
        notes=notes,
        num_evicted_blocks=int(cache.tables.num_evicted_blocks),
        num_evicted_snapshots=int(cache.tables.num_evicted_snapshots),
        num_filed_snapshots=int(cache.num_filed_snapshots),
    )
