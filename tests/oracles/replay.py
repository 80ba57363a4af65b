"""A replay as plain Python: one step after the other, one request after the other.

Times are whole picoseconds in Python integers. Nothing is skipped: where the compiled
loop jumps over equal steps, this one takes each of them.
"""

import dataclasses

from oracles.planner import plan
from oracles.planner_advance import advance
from oracles.planner_points import published_points
from oracles.records import NO_ID, UNLIMITED, Case, Row


@dataclasses.dataclass(eq=False)
class Job:
    """One request and all that becomes of it; twins are still two requests."""

    prompt: int
    output: int
    arrival: int = 0
    patience: int | None = None
    priority: int = 0
    lora_id: int = NO_ID
    points: tuple = ()
    path: object = None  # path(d): names its first d tokens, answer included
    admitted: int | None = None
    first_token: int | None = None
    finish: int | None = None
    reason: str | None = None
    num_outputs: int = 0
    num_computed: int = 0
    chunks: list = dataclasses.field(default_factory=list)
    snapshots: list = dataclasses.field(default_factory=list)
    due: list = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens that it did not have to compute, this time
    learned: tuple = ()  # points that the cache asked for
    num_resumed: int = 0  # output tokens it had when it was preempted
    report: dict = dataclasses.field(default_factory=dict)  # of the cache, see there


@dataclasses.dataclass
class Options:
    """The settings of a run; names as in `jaxsched.simulation.replay.ReplayConfig`."""

    rules: str = "jaxsched"
    chunking_policy: str = "force_chunk"
    snapshot_mode: str = "cut"
    max_emit_points: int = 8
    block_size: int = 16
    chunk_unit: int = 16
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_context_length: int = 0
    snapshot_interval: int = 0
    snapshot_from_start: tuple = ()
    snapshot_from_end: tuple = ()
    save_last: bool = False
    prefix_caching: bool = True
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    branch_snapshots: bool = True
    answer_snapshots: bool = True
    decode_snapshots: bool = True
    kv_blocks: int = 0
    state_slots: int = 0
    capacity_policy: str = "guaranteed_no_evict"
    sequential: bool = False
    base_ps: int = 1
    token_ps: int = 0
    context_ps: int = 0


class Stalled(Exception):
    """Rows are left that nothing will ever let run."""


class NoCache:
    """Pools that are never short and from which nothing is reused."""

    is_closed = False

    def enter(self, job, alone):
        """Whether a job gets its blocks; says what it need not compute."""
        job.cached, job.learned = 0, ()
        return True

    def leave(self, job):
        """A job has ended, in whatever way, or is sent back to the queue."""

    def make_space(self, rows):
        """Gives decodes the blocks of their next step; the rows that lost theirs."""
        return []

    def commit(self, rows, landed, passed):
        """Rows after a step, the points that prefills and decodes stood on."""


def run(jobs, options, cache=None):
    """Fills in what becomes of the jobs; returns the steps as (start, tokens) pairs."""
    cache = cache or NoCache()
    _refuse(jobs, options)
    queue = [job for job in jobs if job.reason is None]
    clock, rows, waiting, steps = 0, [], [], []
    while True:
        clock_of_last = clock
        rows, events = _release(rows, options, clock, cache)
        events += _arrive(queue, waiting, rows, options, clock)
        events += _give_up(waiting, options, clock)
        if events:
            rows = _admit(jobs, waiting, rows, options, clock, cache)
        if not rows and not waiting and not queue:
            return steps
        if any(_deadline(job, options) <= clock for job, _ in rows):
            continue

        for pair in cache.make_space(rows):
            rows.remove(pair)
            _send_back(*pair)
            waiting.append(pair[0])
        case = _case([row for _, row in rows], options)
        answer = plan(case)
        if answer.num_seqs == 0:
            events = [job.arrival for job in queue if not options.sequential]
            events += [_deadline(job, options) for job, _ in rows]
            events += [_deadline(job, options) for job in waiting]
            clock = min(events, default=float("inf"))
            if clock == float("inf"):
                if rows:
                    raise Stalled
                clock = clock_of_last
            continue
        cost, tokens = _cost(case, answer, options)
        steps.append((clock, tokens))
        clock += cost
        rows = _carry_out(rows, case, answer, options, clock, cache)


def _admit(jobs, waiting, rows, options, clock, cache):
    """Lets the most urgent enter, one after the other, until one does not fit."""
    blocked = cache.is_closed or options.capacity_policy == "static_batch"
    if not (blocked and rows):
        waiting.sort(key=lambda job: (-job.priority, jobs.index(job)))
        while waiting and len(rows) < options.max_num_seqs:
            job = waiting[0]
            if not cache.enter(job, alone=not rows):
                break
            waiting.pop(0)
            job.admitted = clock if job.admitted is None else job.admitted
            rows.append((job, _new_row(job, options)))
    return sorted(rows, key=lambda pair: (-pair[0].priority, jobs.index(pair[0])))


def _send_back(job, row):
    """A preempted job: its answer so far will be computed as if it were prompt."""
    job.num_resumed += row.num_output_tokens
    job.num_outputs, job.num_computed = job.num_resumed, row.num_computed_tokens


def _refuse(jobs, options):
    for job in jobs if options.kv_blocks else ():
        held = job.prompt + job.output + options.draft_tokens
        if held > options.kv_blocks * options.block_size:
            job.reason = "refused"
    if options.chunking_policy != "none":
        return
    limits = (options.max_num_batched_tokens, options.max_context_length)
    for job in jobs:
        if any(0 < limit < job.prompt for limit in limits):
            job.reason = "refused"


def _deadline(job, options):
    if job.patience is None:
        return float("inf")
    return (job.admitted if options.sequential else job.arrival) + job.patience


def _release(rows, options, clock, cache):
    """Ends the rows that finished; their clients' patience no longer matters."""
    left = []
    for job, row in rows:
        job.num_outputs = job.num_resumed + row.num_output_tokens
        job.num_computed = row.num_computed_tokens
        if row.phase == "finished":
            job.finish, job.reason = clock, "length"
        elif _deadline(job, options) <= clock:
            job.finish, job.reason = clock, "cancelled"
        else:
            left.append((job, row))
            continue
        cache.leave(job)
        cache.is_closed = False
    return left, len(rows) - len(left)


def _arrive(queue, waiting, rows, options, clock):
    if options.sequential:
        turn = bool(queue and not rows and not waiting)
        if turn:
            queue[0].arrival = clock
            waiting.append(queue.pop(0))
        return int(turn)
    before = len(queue)
    while queue and queue[0].arrival <= clock:
        waiting.append(queue.pop(0))
    return before - len(queue)


def _give_up(waiting, options, clock):
    if options.sequential:
        return 0
    late = [job for job in waiting if _deadline(job, options) <= clock]
    for job in late:
        job.finish, job.reason = clock, "cancelled"
        waiting.remove(job)
    return len(late)


def _new_row(job, options):
    job.due = published_points(
        job.prompt,
        options.prefix_caching,
        options.snapshot_interval,
        options.snapshot_from_start,
        options.snapshot_from_end,
        (*job.points, *job.learned),
        options.save_last,
        options.block_size,
    )
    # An answer that is computed again is cut at the periodic points alone.
    periodic = options.snapshot_interval if options.prefix_caching else 0
    return Row(
        phase="prefill",
        num_prompt_tokens=job.prompt + job.num_resumed,
        num_computed_tokens=job.cached,
        num_cached_tokens=job.cached,
        max_new_tokens=job.output - job.num_resumed,
        lora_id=job.lora_id,
        snapshot_interval=periodic,
        snapshot_points=list(job.due),
    )


def _case(rows, options):
    for row in rows:
        row.num_draft_tokens = options.draft_tokens if row.phase == "decode" else 0
    return Case(
        rules=options.rules,
        chunking_policy=options.chunking_policy,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or UNLIMITED,
        max_context_length=options.max_context_length or UNLIMITED,
        chunk_unit_size=options.chunk_unit,
        encoder_decoder=False,
        snapshot_mode=options.snapshot_mode,
        max_emit_points=options.max_emit_points,
        group_by_lora=True,
        rows=rows,
    )


def _cost(case, answer, options):
    tokens = context = 0
    for index, row in enumerate(case.rows):
        own = answer.num_scheduled_tokens[index] + answer.num_draft_tokens[index]
        if answer.prefill_mask[index] or answer.decode_mask[index]:
            tokens += own
            context += row.num_computed_tokens + own
    cost = options.base_ps + options.token_ps * tokens + options.context_ps * context
    return cost, tokens


def _carry_out(rows, case, answer, options, clock, cache):
    accepted, stood_on, passed = [], [], []
    for index, row in enumerate(case.rows):
        kept = min(answer.num_draft_tokens[index], options.accepted_draft_tokens)
        accepted.append(min(kept, row.max_new_tokens - row.num_output_tokens - 1))
    after = advance(case, answer, accepted=accepted)
    moved = []
    for index, (job, _) in enumerate(rows):
        stood_on.append([])
        passed.append([])
        if answer.prefill_mask[index]:
            job.chunks.append(after.rows[index].num_computed_tokens)
            landed = [answer.snapshot_point[index], *answer.emit_points[index]]
            stood_on[index] = [point for point in landed if point != NO_ID]
            job.snapshots += sorted(stood_on[index])
            if answer.is_last_chunk[index] and job.first_token is None:
                job.first_token = clock
        elif answer.decode_mask[index]:
            passed[index] = _passed(after.rows[index], options)
        moved.append((job, after.rows[index]))
    cache.commit(moved, stood_on, passed)
    return moved


def _passed(row, options):
    """A periodic point on which a decode stands now."""
    interval = options.snapshot_interval * options.decode_snapshots
    if not options.prefix_caching or not interval:
        return []
    return [row.num_computed_tokens] * (row.num_computed_tokens % interval == 0)
