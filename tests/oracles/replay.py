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
    admitted: int | None = None
    first_token: int | None = None
    finish: int | None = None
    reason: str | None = None
    num_outputs: int = 0
    num_computed: int = 0
    chunks: list = dataclasses.field(default_factory=list)
    snapshots: list = dataclasses.field(default_factory=list)
    due: list = dataclasses.field(default_factory=list)


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
    sequential: bool = False
    base_ps: int = 1
    token_ps: int = 0
    context_ps: int = 0


class Stalled(Exception):
    """Rows are left that nothing will ever let run."""


def run(jobs, options):
    """Fills in what becomes of the jobs; returns the steps as (start, tokens) pairs."""
    _refuse(jobs, options)
    queue = [job for job in jobs if job.reason is None]
    clock, rows, waiting, steps = 0, [], [], []
    while True:
        clock_of_last = clock
        rows = _release(rows, clock)
        _arrive(queue, waiting, rows, options, clock)
        _give_up(waiting, options, clock)
        while waiting and len(rows) < options.max_num_seqs:
            waiting.sort(key=lambda job: (-job.priority, jobs.index(job)))
            job = waiting.pop(0)
            job.admitted = clock
            rows.append((job, _new_row(job, options)))
        rows.sort(key=lambda pair: (-pair[0].priority, jobs.index(pair[0])))
        if not rows and not waiting and not queue:
            return steps
        if any(_deadline(job, options) <= clock for job, _ in rows):
            continue

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
        rows = _carry_out(rows, case, answer, options, clock)


def _refuse(jobs, options):
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


def _release(rows, clock):
    """Ends the rows that finished; their clients' patience no longer matters."""
    left = []
    for job, row in rows:
        job.num_outputs, job.num_computed = (
            row.num_output_tokens,
            row.num_computed_tokens,
        )
        if row.phase == "finished":
            job.finish, job.reason = clock, "length"
        else:
            left.append((job, row))
    return left


def _arrive(queue, waiting, rows, options, clock):
    for job, _ in list(rows):
        if _deadline(job, options) <= clock:
            job.finish, job.reason = clock, "cancelled"
    rows[:] = [pair for pair in rows if pair[0].reason is None]
    if options.sequential:
        if queue and not rows and not waiting:
            queue[0].arrival = clock
            waiting.append(queue.pop(0))
        return
    while queue and queue[0].arrival <= clock:
        waiting.append(queue.pop(0))


def _give_up(waiting, options, clock):
    if options.sequential:
        return
    for job in list(waiting):
        if _deadline(job, options) <= clock:
            job.finish, job.reason = clock, "cancelled"
            waiting.remove(job)


def _new_row(job, options):
    job.due = published_points(
        job.prompt,
        options.prefix_caching,
        options.snapshot_interval,
        options.snapshot_from_start,
        options.snapshot_from_end,
        job.points,
        options.save_last,
        options.block_size,
    )
    return Row(
        phase="prefill",
        num_prompt_tokens=job.prompt,
        max_new_tokens=job.output,
        lora_id=job.lora_id,
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


def _carry_out(rows, case, answer, options, clock):
    accepted = []
    for index, row in enumerate(case.rows):
        kept = min(answer.num_draft_tokens[index], options.accepted_draft_tokens)
        accepted.append(min(kept, row.max_new_tokens - row.num_output_tokens - 1))
    after = advance(case, answer, accepted=accepted)
    moved = []
    for index, (job, _) in enumerate(rows):
        if answer.prefill_mask[index]:
            job.chunks.append(after.rows[index].num_computed_tokens)
            landed = [answer.snapshot_point[index], *answer.emit_points[index]]
            job.snapshots += sorted(point for point in landed if point != NO_ID)
            if answer.is_last_chunk[index]:
                job.first_token = clock
        moved.append((job, after.rows[index]))
    return moved
