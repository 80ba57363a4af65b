"""The `tensorrt_llm` rules as sequential loops: one step of the micro-batch planner.

After the published Python scheduler of TensorRT-LLM (PR #16427), in own code.
"""

from oracles import records
from oracles.planner_common import (
    chunk_cost,
    exclusion,
    place_decode,
    place_encode,
    place_prefill,
    set_order,
    shown_total,
    stop_after,
)
from oracles.records import UNLIMITED, empty_answer


class _Refused(Exception):
    """The reference raises on this input."""


def plan_tensorrt_llm(case):
    """The answer of the `tensorrt_llm` rules to a `records.Case`."""
    answer = empty_answer(case)
    try:
        queued, used, all_fit = _walk(case, answer)
        sizes, drafts = _size_queued(case, queued, used, all_fit)
    except _Refused as refused:
        return _refuse(case, refused.args[0])
    left = _left(case, used) - sum(sizes[i] for i in queued)
    if case.chunking_policy != "force_chunk":
        left = _left(case, used) - sum(_cost_of(case, i, sizes) for i in queued)
    for index in queued:
        if sizes[index] > 0:
            place_prefill(case, answer, index, sizes[index], drafts[index])
            used += _cost_of(case, index, sizes)
        elif left == 0:
            answer.reason[index] = records.NO_BUDGET
        else:
            answer.reason[index] = records.BELOW_UNIT
    answer.num_batched_tokens = shown_total(used)
    set_order(case, answer)
    return answer


def _walk(case, answer):
    """The loop over the queue: takes rows, or queues them for the chunk pass."""
    budget, context = case.max_num_batched_tokens, case.max_context_length
    used, queued_cost, slots, beam_width = 0, 0, 0, None
    queued, all_fit = [], case.chunking_policy != "force_chunk"
    stopped = None
    for index, row in enumerate(case.rows):
        answer.reason[index] = exclusion(case, row)
        if answer.reason[index] is not None:
            continue
        if stopped is not None:
            answer.reason[index] = stopped
            continue
        if row.phase == "prefill" and case.chunking_policy != "none":
            tokens = chunk_cost(case, row, row.remaining) + row.num_draft_tokens
            if tokens > context:
                tokens, all_fit = context, False
            queued.append(index)
            queued_cost += tokens
        else:
            tokens = _whole_tokens(case, row)
            if row.phase != "decode" and tokens > context:
                raise _Refused(records.ABOVE_CONTEXT_LENGTH)
            if budget != UNLIMITED and used + tokens > budget:
                answer.reason[index] = records.NO_BUDGET
                stopped = records.BEHIND_BLOCKED
                continue
            if row.phase == "decode":
                beam_width = beam_width or row.beam_width
                if row.beam_width != beam_width:
                    answer.reason[index] = records.BEAM_WIDTH
                    continue
            _take(case, answer, index)
            used += tokens
        slots += 1
        if slots >= case.max_num_seqs:
            stopped = records.BATCH_FULL
    if budget != UNLIMITED and queued_cost > budget - used:
        all_fit = False
    return queued, used, all_fit


def _whole_tokens(case, row):
    """Tokens of a row that is taken whole or not at all."""
    if row.phase == "encode":
        return row.num_encoder_tokens
    if row.phase == "decode":
        return row.beam_width + row.num_draft_tokens
    # The reference measures the whole sequence here, not what remains of it.
    base = row.num_prompt_tokens + row.num_output_tokens
    if row.at_first_chunk and row.num_reusable_tokens > 0:
        base = min(base, max(0, row.remaining - row.num_reusable_tokens))
    return max(1, base + row.num_draft_tokens)


def _take(case, answer, index):
    row = case.rows[index]
    if row.phase == "encode":
        place_encode(answer, index, row.num_encoder_tokens)
    elif row.phase == "decode":
        place_decode(case, answer, index, row.num_draft_tokens)
    else:
        place_prefill(case, answer, index, row.remaining, row.num_draft_tokens)


def _size_queued(case, queued, used, all_fit):
    """Chunk size and kept drafts of every queued row."""
    sizes = {i: case.rows[i].remaining for i in queued}
    drafts = {i: case.rows[i].num_draft_tokens for i in queued}
    if all_fit or not queued:
        return sizes, drafts
    sizes = {
        "force_chunk": _force_chunk,
        "first_come_first_served": _first_come_first_served,
        "equal_progress": _equal_progress,
    }[case.chunking_policy](case, queued, _left(case, used))
    return sizes, _fit_drafts(case, queued, sizes, _left(case, used))


def _force_chunk(case, queued, capacity):
    unit, context = case.chunk_unit_size, case.max_context_length
    if context < unit:
        raise _Refused(records.CONTEXT_BELOW_UNIT)
    sizes, total = {}, 0
    for index in queued:
        row = case.rows[index]
        size = stop_after(row) - row.num_computed_tokens
        if size > context:
            size = context // unit * unit
        if total + size > capacity:
            size = min(size, max(0, capacity - total)) // unit * unit
        sizes[index] = size
        total += size
    return sizes


def _first_come_first_served(case, queued, capacity):
    unit, context = case.chunk_unit_size, case.max_context_length
    sizes, left = {}, capacity
    for index in queued:
        row = case.rows[index]
        size = row.remaining
        if left < chunk_cost(case, row, size):
            size = left
        if chunk_cost(case, row, size) > context:
            size = min(context, row.remaining)
        if size < row.remaining:
            size = size // unit * unit
        sizes[index] = size
        left -= chunk_cost(case, row, size)
    return sizes


def _equal_progress(case, queued, capacity):
    unit, context = case.chunk_unit_size, case.max_context_length
    sizes, used, progress = dict.fromkeys(queued, 0), 0, True
    while used < capacity and progress:
        progress = False
        for index in queued:
            row, size = case.rows[index], sizes[index]
            offer = min(size + unit, row.remaining)
            price = chunk_cost(case, row, offer) - chunk_cost(case, row, size)
            if used + price > capacity or offer > context:
                continue
            used += price
            progress = progress or offer > size
            sizes[index] = offer
    return sizes


def _fit_drafts(case, queued, sizes, capacity):
    """Drafts that need no further unit and no further budget.

    Only rows at their last chunk are looked at; the others keep what they brought.
    """
    unit = case.chunk_unit_size
    total = sum(_cost_of(case, i, sizes) for i in queued)
    drafts = {i: case.rows[i].num_draft_tokens for i in queued}
    for index in queued:
        row, size = case.rows[index], sizes[index]
        if size != row.remaining:
            continue
        space = -size % unit
        if case.max_context_length != UNLIMITED:
            space = max(0, min(space, case.max_context_length - size))
        keep = min(row.num_draft_tokens, space)
        keep = max(0, min(keep, capacity - total))
        total += keep
        drafts[index] = keep
    return drafts


def _cost_of(case, index, sizes):
    return chunk_cost(case, case.rows[index], sizes[index])


def _left(case, used):
    """Capacity of the chunk pass; an unlimited one compares as infinity."""
    if case.max_num_batched_tokens == UNLIMITED:
        return float("inf")
    return case.max_num_batched_tokens - used


def _refuse(case, error):
    answer = empty_answer(case)
    answer.error = error
    for index, row in enumerate(case.rows):
        excluded = exclusion(case, row)
        answer.reason[index] = records.PLAN_ERROR if excluded is None else excluded
    return answer
