"""Who is in the request table: arrivals, admission by urgency, cancellation, release.

The waiting queue needs no storage of its own: it is what has arrived and not left.
Everything here happens between two steps, at the clock.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import MAX_COUNT, NO_ID, Phase
from jaxsched.core.masking import first_true, iota
from jaxsched.core.requests import RequestTable
from jaxsched.simulation.cache_admission import (
    Seats,
    empty_seats,
    enter_cache,
    leave_cache,
)
from jaxsched.simulation.cache_state import CacheColumn, CacheSetup
from jaxsched.simulation.replay_clock import (
    Ticks,
    add,
    earlier,
    earliest,
    less,
    milliseconds,
    never,
    select,
)
from jaxsched.simulation.replay_state import (
    Arrivals,
    FinishReason,
    ReplayState,
    ResultColumn,
    Settings,
)

Array = jax.Array

_LAST = MAX_COUNT  # sorts behind every rank


def next_arrival(arrivals: Arrivals, settings: Settings, state: ReplayState) -> Ticks:
    """When the next request comes; NEVER if none does, or none by the clock."""
    coming = _at(arrivals.arrival, state.num_arrived)
    return select(settings.sequential, never(), coming)


def has_events(arrivals: Arrivals, settings: Settings, state: ReplayState) -> Array:
    """Whether something has happened that `settle` must take note of; bool[]."""
    finished = jnp.any(state.table.phase == Phase.FINISHED)
    arrived = ~less(state.clock, next_arrival(arrivals, settings, state))
    given_up = ~less(state.clock, state.next_deadline)
    return finished | arrived | given_up | _turn_comes(settings, state)


def settle(
    arrivals: Arrivals,
    settings: Settings,
    state: ReplayState,
    window: int,
    setup: CacheSetup,
) -> ReplayState:
    """Releases rows that ended, lets requests arrive, and fills the free rows.

    Args:
      arrivals: the requests.
      settings: of the run.
      state: rows may be finished, requests may be due.
      window: places of `Arrivals.order` that are looked at; static. All of them, or,
        where requests leave the queue only in order, as many as there are rows.
      setup: of the cache; static.
    """
    state = _release(arrivals, state, setup)
    state = _let_arrive(arrivals, settings, state)
    queue = arrivals.order.at[state.head + iota(window)].get(
        mode="fill", fill_value=arrivals.order.shape[0] - 1
    )
    waiting = (queue < state.num_arrived) & ~state.left_queue[queue]
    due = _at(arrivals.deadline, queue)
    given_up = waiting & ~less(state.clock, due) & ~settings.sequential
    state = _record_given_up(state, queue, given_up)
    waiting &= ~given_up
    state, admitted = _admit(arrivals, settings, state, queue, waiting, setup)
    waiting &= ~admitted

    left = state.left_queue[queue]
    rows_due = _where_living(state.table.phase, state.deadline)
    queue_due = select(waiting & ~settings.sequential, due, never())
    return state.replace(
        head=state.head + first_true(~left),
        next_deadline=earlier(earliest(rows_due), earliest(queue_due)),
    )


def _at(values: Ticks, index: Array) -> Ticks:
    return Ticks(values.hi[index], values.lo[index])


def _living(phase: Array) -> Array:
    return (phase == Phase.PREFILL) | (phase == Phase.DECODE)


def _where_living(phase: Array, values: Ticks) -> Ticks:
    return select(_living(phase), values, never())


def _turn_comes(settings: Settings, state: ReplayState) -> Array:
    """Whether the next request of a sequential run arrives; bool[]."""
    more = state.num_arrived < settings.num_requests
    return settings.sequential & more & ~jnp.any(_living(state.table.phase))


def _release(arrivals: Arrivals, state: ReplayState, setup: CacheSetup) -> ReplayState:
    """Writes the results of rows that ended and empties them."""
    table, num_rows = state.table, state.table.num_rows
    finished = table.phase == Phase.FINISHED
    expired = _living(table.phase) & ~less(state.clock, state.deadline)
    gone = finished | expired
    reason = jnp.where(finished, FinishReason.LENGTH, FinishReason.CANCELLED)
    run = state.cache
    answered = run.note(table.request_id, CacheColumn.NUM_RESUMED_OUTPUTS)
    outputs = table.num_output_tokens + answered
    if setup.is_used:
        run = leave_cache(run, gone, setup)
    columns = (
        *(state.admitted.hi, state.admitted.lo),
        *(state.first_token.hi, state.first_token.lo),
        *(state.clock.hi, state.clock.lo),
        *(outputs, table.num_computed_tokens, reason),
    )
    rows = [jnp.broadcast_to(c, (num_rows,)).astype(jnp.uint32) for c in columns]
    nowhere = state.results.shape[0]
    place = jnp.where(gone, table.request_id, nowhere)
    return state.replace(
        cache=run,
        table=table.replace(phase=jnp.where(gone, Phase.EMPTY, table.phase)),
        results=state.results.at[place].set(jnp.stack(rows, axis=1), mode="drop"),
        num_ended=state.num_ended + jnp.sum(gone.astype(jnp.int32)),
    )


def _let_arrive(
    arrivals: Arrivals, settings: Settings, state: ReplayState
) -> ReplayState:
    """Counts what has arrived by the clock, or the one whose turn it is."""
    turn = _turn_comes(settings, state).astype(jnp.int32)

    def here(count: Array) -> Array:
        due = ~less(state.clock, _at(arrivals.arrival, count))
        return due & ~settings.sequential

    count = lax.while_loop(here, lambda count: count + 1, state.num_arrived)
    return state.replace(num_arrived=count + turn)


def _record_given_up(state: ReplayState, queue: Array, given_up: Array) -> ReplayState:
    """Writes the results of requests whose client left while they waited."""
    nowhere = state.results.shape[0]
    place = jnp.where(given_up, queue, nowhere)
    late, run = never(), state.cache
    # One that was preempted keeps what it had.
    was_here = run.note(queue, CacheColumn.NUM_PREEMPTIONS) > 0
    columns = [
        *(late.hi, late.lo, late.hi, late.lo, state.clock.hi, state.clock.lo),
        run.note(queue, CacheColumn.NUM_RESUMED_OUTPUTS).astype(jnp.uint32),
        run.note(queue, CacheColumn.NUM_REACHED_TOKENS).astype(jnp.uint32),
        jnp.uint32(FinishReason.CANCELLED),
    ]
    rows = jnp.stack([jnp.broadcast_to(c, queue.shape) for c in columns], axis=1)
    times = iota(len(columns))[None, :] <= ResultColumn.FIRST_TOKEN_LO
    rows = jnp.where(was_here[:, None] & times, state.results[queue], rows)
    return state.replace(
        results=state.results.at[place].set(rows, mode="drop"),
        left_queue=state.left_queue.at[place].set(True, mode="drop"),
        num_ended=state.num_ended + jnp.sum(given_up.astype(jnp.int32)),
    )


def _admit(
    arrivals: Arrivals,
    settings: Settings,
    state: ReplayState,
    queue: Array,
    waiting: Array,
    setup: CacheSetup,
) -> tuple[ReplayState, Array]:
    """Seats the most urgent waiting requests in free rows; and which of the queue."""
    num_rows = state.table.num_rows
    living = _living(state.table.phase)
    free = settings.budget.max_num_seqs - jnp.sum(living.astype(jnp.int32))
    place = jnp.cumsum(waiting.astype(jnp.int32))  # 1 for the most urgent
    seats = iota(num_rows)
    chosen = queue.at[jnp.searchsorted(place, seats + 1)].get(mode="clip")
    free = jnp.minimum(free, place[-1])
    taken = empty_seats(num_rows)
    if setup.is_used:
        waits = state.cache.is_closed | settings.cache.whole_batches
        free = jnp.where(waits & jnp.any(living), 0, free)
        now = milliseconds(state.clock)
        run, taken, free = enter_cache(
            arrivals, settings, state.cache, chosen, free, now, setup
        )
        state = state.replace(cache=run)
    admitted = waiting & (place <= free)
    seated = seats < free

    nowhere = state.left_queue.shape[0]
    left = state.left_queue.at[jnp.where(seated, chosen, nowhere)].set(
        True, mode="drop"
    )
    ranks = (
        jnp.where(living, arrivals.rank[state.table.request_id], _LAST),
        jnp.where(seated, arrivals.rank[chosen], _LAST),
    )
    rank, source = lax.sort(
        (jnp.concatenate(ranks), iota(2 * num_rows)), num_keys=1, is_stable=True
    )
    rank, source = rank[:num_rows], source[:num_rows]
    state = _arrange(arrivals, settings, state, rank, source, chosen, taken)
    return state.replace(left_queue=left), admitted


def _arrange(
    arrivals: Arrivals,
    settings: Settings,
    state: ReplayState,
    rank: Array,
    source: Array,
    chosen: Array,
    seats: Seats,
) -> ReplayState:
    """Puts rows in their new order: rows that stay, and requests that enter.

    Args:
      arrivals: the requests.
      settings: of the run.
      state: rows in their old order.
      rank: i32[R], of each new row; _LAST: nobody.
      source: i32[R], where each new row comes from: an old row, or R + a newcomer.
      chosen: i32[R], the newcomers' requests.
      seats: where they stand in the cache.
    """
    table, num_rows = state.table, state.table.num_rows
    taken, stays = rank < _LAST, source < num_rows
    old = jnp.minimum(source, num_rows - 1)
    nth = jnp.maximum(source - num_rows, 0)
    request = jnp.where(stays, table.request_id[old], chosen[nth])
    request = jnp.where(taken, request, arrivals.rank.shape[0] - 1)

    def carry(values: Array, fresh: Array | int) -> Array:
        return jnp.where(stays & taken, values[old], fresh)

    run = state.cache
    cached = carry(table.num_cached_tokens, seats.num_cached_tokens[nth])
    learned = jnp.where((stays & taken)[:, None], run.learned[old], seats.learned[nth])
    answered = run.note(request, CacheColumn.NUM_RESUMED_OUTPUTS)
    was_here = run.note(request, CacheColumn.NUM_PREEMPTIONS) > 0
    points = _points_of(arrivals, request, table)
    before = state.results[request]

    def noted(hi: ResultColumn, lo: ResultColumn, otherwise: Ticks) -> Ticks:
        return select(was_here, Ticks(before[:, hi], before[:, lo]), otherwise)

    def carry_ticks(values: Ticks, fresh: Ticks) -> Ticks:
        return Ticks(carry(values.hi, fresh.hi), carry(values.lo, fresh.lo))

    due = _at(arrivals.deadline, request)
    # A sequential run knows the arrival only now: the deadline is an allowance.
    allowed = settings.sequential & less(due, never())
    due = select(allowed, add(state.clock, due), due)
    return state.replace(
        table=table.replace(
            request_id=jnp.where(taken, request, NO_ID),
            phase=jnp.where(taken, carry(table.phase, Phase.PREFILL), Phase.EMPTY),
            num_prompt_tokens=arrivals.num_prompt_tokens[request] + answered,
            num_computed_tokens=carry(table.num_computed_tokens, cached),
            num_cached_tokens=cached,
            num_output_tokens=carry(table.num_output_tokens, 0),
            max_new_tokens=arrivals.max_new_tokens[request] - answered,
            lora_id=arrivals.lora_id[request],
            priority=arrivals.priority[request],
            arrival=arrivals.arrival_ms[request],
            requested_points=jnp.concatenate([points, learned], axis=1),
        ),
        cache=run.replace(row=carry(run.row, seats.row[nth]), learned=learned),
        admitted=carry_ticks(
            state.admitted,
            noted(ResultColumn.ADMITTED_HI, ResultColumn.ADMITTED_LO, state.clock),
        ),
        first_token=carry_ticks(
            state.first_token,
            noted(ResultColumn.FIRST_TOKEN_HI, ResultColumn.FIRST_TOKEN_LO, never()),
        ),
        deadline=carry_ticks(state.deadline, due),
    )


def _points_of(arrivals: Arrivals, request: Array, table: RequestTable) -> Array:
    """The points that the callers of some requests chose, i32[R, C], NO_ID padded.

    The last two columns of the table's own are kept for what the cache asks for.
    """
    column = iota(table.requested_points.shape[1] - 2)[None, :]
    entry = arrivals.first_point[request][:, None] + column
    points = arrivals.points.at[entry].get(mode="clip")
    return jnp.where(column < arrivals.num_points[request][:, None], points, NO_ID)
