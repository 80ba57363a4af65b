"""The `jaxsched` rules as sequential loops: one step of the planner.

Decodes first, then rows that are taken whole, then prefills in chunks. Rows are dealt
with one after the other, in queue order; nothing here is clever.
"""

from oracles import records
from oracles.planner_common import (
    chunk_cost,
    exclusion,
    place_decode,
    place_encode,
    place_prefill,
    reusable,
    set_order,
    shown_total,
    stop_after,
)
from oracles.records import UNLIMITED, empty_answer


def plan_jaxsched(case):
    """The answer of the `jaxsched` rules to a `records.Case`."""
    answer = empty_answer(case)
    answer.reason = [exclusion(case, row) for row in case.rows]
    eligible = [i for i, reason in enumerate(answer.reason) if reason is None]
    used, count = _take_decodes(case, answer, eligible)
    used, count = _take_whole(case, answer, eligible, used, count)
    if case.chunking_policy != "none":
        capacity = _infinite(case.max_num_batched_tokens) - used
        slots = case.max_num_seqs - count
        rest = _not_behind_refused(case, answer, eligible)
        used += _take_chunks(case, answer, rest, capacity, slots)
    answer.num_batched_tokens = shown_total(used)
    set_order(case, answer)
    return answer


def _infinite(limit):
    """A limit that compares as infinity where there is none."""
    return float("inf") if limit == UNLIMITED else limit


def _take_decodes(case, answer, eligible):
    budget = _infinite(case.max_num_batched_tokens)
    width, wanted = None, []
    for index in eligible:
        row = case.rows[index]
        if row.phase != "decode":
            continue
        if row.beam_width > budget:
            answer.reason[index] = records.TOO_LARGE
            continue
        width = width or row.beam_width
        if row.beam_width != width:
            answer.reason[index] = records.BEAM_WIDTH
            continue
        drafts = max(0, min(row.num_draft_tokens, budget - row.beam_width))
        wanted.append((index, row.beam_width + drafts, drafts))

    def place(index, drafts):
        place_decode(case, answer, index, drafts)

    return _take_in_order(case, answer, wanted, place, 0, 0)


def _take_whole(case, answer, eligible, used, count):
    room = min(
        _infinite(case.max_num_batched_tokens), _infinite(case.max_context_length)
    )
    wanted = []
    for index in eligible:
        row, drafts = case.rows[index], 0
        if row.phase == "encode":
            tokens = max(1, row.num_encoder_tokens)
        elif row.phase == "prefill" and case.chunking_policy == "none":
            tokens = max(1, row.remaining - reusable(case, row))
            drafts = max(0, min(row.num_draft_tokens, room - tokens))
        else:
            continue
        if tokens > room:
            answer.reason[index] = records.TOO_LARGE
            continue
        wanted.append((index, tokens + drafts, drafts))

    def place(index, drafts):
        row = case.rows[index]
        if row.phase == "encode":
            place_encode(answer, index, max(1, row.num_encoder_tokens))
        else:
            place_prefill(case, answer, index, row.remaining, drafts)

    return _take_in_order(case, answer, wanted, place, used, count)


def _take_in_order(case, answer, wanted, place, used, count):
    """Takes (row, tokens, drafts) until one does not fit; returns used and count."""
    budget = _infinite(case.max_num_batched_tokens)
    stopped = None
    for index, tokens, drafts in wanted:
        if stopped is not None:
            answer.reason[index] = stopped
        elif count >= case.max_num_seqs:
            answer.reason[index] = stopped = records.BATCH_FULL
        elif used + tokens > budget:
            answer.reason[index] = records.NO_BUDGET
            stopped = records.BEHIND_BLOCKED
        else:
            place(index, drafts)
            used += tokens
            count += 1
    return used, count


def _not_behind_refused(case, answer, eligible):
    """Holds the prefills behind an encoder input that the budget refused.

    Served ahead of it they would turn into decodes, and for as long as requests
    arrive its budget would never be free at once.
    """
    rest, refused = [], False
    for index in eligible:
        if refused and case.rows[index].phase == "prefill":
            answer.reason[index] = records.BEHIND_BLOCKED
        else:
            rest.append(index)
        if case.rows[index].phase == "encode":
            refused = refused or answer.reason[index] == records.NO_BUDGET
    return rest


def _take_chunks(case, answer, eligible, capacity, slots):
    """Sizes and places the chunked prefills; returns what they are charged."""
    queue = [i for i in eligible if case.rows[i].phase == "prefill"]
    if case.max_context_length < 1:
        for index in queue:
            answer.reason[index] = records.TOO_LARGE
        return 0
    if min(capacity, _infinite(case.max_context_length)) < case.chunk_unit_size:
        sizes = _below_one_unit(case, queue, capacity, slots)
    elif case.chunking_policy == "equal_progress":
        sizes = _equal_progress(case, queue, capacity, slots)
    else:
        sizes = _first_fit(case, queue, capacity, slots)
    _explain_zeros(case, answer, queue, sizes, capacity, slots)

    charged = sum(chunk_cost(case, case.rows[i], sizes[i]) for i in queue)
    left = capacity - charged
    for index in queue:
        row, size = case.rows[index], sizes[index]
        if size == 0:
            continue
        keep = 0
        if size == row.remaining:
            space = -row.num_prompt_tokens % case.chunk_unit_size
            space = max(0, min(space, _infinite(case.max_context_length) - size))
            keep = min(row.num_draft_tokens, space, left)
            left -= keep
            charged += keep
        place_prefill(case, answer, index, size, keep)
    return charged


def _wanted(case, row):
    """The longest chunk that honours the row's points."""
    skipped = case.max_emit_points if case.snapshot_mode == "emit" else 0
    return stop_after(row, skipped) - row.num_computed_tokens


def _chargeable(case, row):
    """The most a row is charged while chunks are sized.

    A forced chunk ignores the estimate: recurrent states cannot be estimated.
    """
    if case.chunking_policy == "force_chunk":
        return row.remaining
    return row.remaining - reusable(case, row)


def _end_on_unit(case, row, room):
    """The largest chunk within `room` that ends on a unit boundary."""
    unit, position = case.chunk_unit_size, row.num_computed_tokens
    return max(0, (position + room) // unit * unit - position)


def _below_one_unit(case, queue, capacity, slots):
    """Chunks for a budget or a context limit that is below one unit."""
    context = _infinite(case.max_context_length)
    sizes, left, served = dict.fromkeys(queue, 0), capacity, 0
    for index in queue:
        row = case.rows[index]
        if served == slots:
            break
        size = _wanted(case, row)
        cost = min(size, _chargeable(case, row))
        if cost > context:
            size = cost = context
        if cost > left:
            size = cost = left
        sizes[index] = size
        left -= cost
        served += size > 0
    return sizes


def _first_fit(case, queue, capacity, slots):
    """Force_chunk and first_come_first_served."""
    context = _infinite(case.max_context_length)
    sizes, left, served = dict.fromkeys(queue, 0), capacity, 0
    for index in queue:
        row = case.rows[index]
        if served == slots:
            break
        size = _wanted(case, row)
        cost = min(size, _chargeable(case, row))
        if cost > context:
            size = cost = _end_on_unit(case, row, context)
        if cost > left:
            size = cost = _end_on_unit(case, row, left)
        sizes[index] = size
        left -= cost
        served += size > 0
    return sizes


def _equal_progress(case, queue, capacity, slots):
    """One unit boundary after the other, row by row, while capacity lasts."""
    unit, context = case.chunk_unit_size, _infinite(case.max_context_length)
    sizes, ceilings, used = dict.fromkeys(queue, 0), {}, 0
    for index in queue:
        row = case.rows[index]
        ceilings[index] = _wanted(case, row)
        if ceilings[index] > context:
            ceilings[index] = _end_on_unit(case, row, context)

    def offer(index):
        """The size and the added cost of one step to the next boundary."""
        row, size = case.rows[index], sizes[index]
        end = row.num_computed_tokens + size
        longer = min(size + unit - end % unit, ceilings[index])
        most = min(ceilings[index], _chargeable(case, row))
        return longer, min(longer, most) - min(size, most)

    accepted = []
    for index in queue:
        size, price = offer(index)
        if len(accepted) < slots and used + price <= capacity and size > 0:
            sizes[index] = size
            used += price
            accepted.append(index)
    progress = bool(accepted)
    while used < capacity and progress:
        progress = False
        for index in accepted:
            size, price = offer(index)
            if size > sizes[index] and used + price <= capacity:
                sizes[index] = size
                used += price
                progress = True
    return sizes


def _explain_zeros(case, answer, queue, sizes, capacity, slots):
    """Names what a prefill that got nothing waits for."""
    spent = sum(min(sizes[i], _chargeable(case, case.rows[i])) for i in queue)
    served = 0
    for index in queue:
        if sizes[index] > 0:
            served += 1
        elif served >= slots:
            answer.reason[index] = records.BATCH_FULL
        elif spent == capacity:
            answer.reason[index] = records.NO_BUDGET
        else:
            answer.reason[index] = records.BELOW_UNIT
