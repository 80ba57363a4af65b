"""What must hold of any plan, checked on one `records.Answer` in plain Python."""

from oracles import records
from oracles.planner_common import chunk_cost, exclusion, points_of


def limit(value):
    """A limit that compares as infinity where there is none."""
    return float("inf") if value == records.UNLIMITED else value


def scheduled_rows(answer):
    """Indices of the rows that got something."""
    return [i for i, reason in enumerate(answer.reason) if reason == records.SCHEDULED]


def charged(case, answer):
    """Tokens that a plan costs, added up from its rows."""
    total = 0
    for index in scheduled_rows(answer):
        size = answer.num_scheduled_tokens[index]
        if answer.prefill_mask[index]:
            size = chunk_cost(case, case.rows[index], size)
        total += size + answer.num_draft_tokens[index]
    return total


def check_bookkeeping(case, answer):
    """Masks, order, counts and reasons tell the same story; no row has zero tokens."""
    rows = scheduled_rows(answer)
    assert answer.num_seqs == len(rows)
    assert sorted(i for i in answer.order if i != records.NO_ID) == rows
    assert answer.order[len(rows) :] == [records.NO_ID] * (len(case.rows) - len(rows))
    for index in range(len(case.rows)):
        kinds = (
            answer.prefill_mask[index],
            answer.decode_mask[index],
            answer.encode_mask[index],
        )
        assert sum(kinds) == (index in rows)
        if index in rows:
            assert exclusion(case, case.rows[index]) is None
            if case.rules == "jaxsched" or not answer.encode_mask[index]:
                assert answer.num_scheduled_tokens[index] > 0
        else:
            assert answer.num_scheduled_tokens[index] == 0
            assert answer.num_draft_tokens[index] == 0
            assert not answer.is_last_chunk[index]
            assert answer.snapshot_point[index] == records.NO_ID
            assert set(answer.emit_points[index]) == {records.NO_ID}


def check_limits(case, answer):
    """Tokens and rows stay within the budget, what is charged is what was dealt out."""
    assert answer.num_seqs <= case.max_num_seqs
    if case.max_num_batched_tokens != records.UNLIMITED:
        assert answer.num_batched_tokens <= case.max_num_batched_tokens
    if case.rules == "jaxsched":
        held = min(charged(case, answer), records.MAX_COUNT + 1)
        assert answer.num_batched_tokens == held
        for index in scheduled_rows(answer):
            if not answer.decode_mask[index]:
                size = answer.num_scheduled_tokens[index]
                if answer.prefill_mask[index]:
                    size = chunk_cost(case, case.rows[index], size)
                assert size <= limit(case.max_context_length)


def check_points(case, answer):
    """No chunk runs past a point without ending on it or emitting its state."""
    if case.chunking_policy == "none":
        return
    if case.rules == "tensorrt_llm" and case.chunking_policy != "force_chunk":
        return
    for index in scheduled_rows(answer):
        if not answer.prefill_mask[index]:
            continue
        row = case.rows[index]
        end = row.num_computed_tokens + answer.num_scheduled_tokens[index]
        assert end <= row.num_prompt_tokens
        assert answer.is_last_chunk[index] == (end == row.num_prompt_tokens)
        inner = [p for p in points_of(row) if row.num_computed_tokens < p < end]
        emitted = [p for p in answer.emit_points[index] if p != records.NO_ID]
        assert emitted == inner
        on_point = end in points_of(row)
        assert answer.snapshot_point[index] == (end if on_point else records.NO_ID)


def check_alignment(case, answer):
    """A chunk cut by a limit ends on a unit boundary, unless no unit fits at all."""
    if case.rules != "jaxsched" or case.chunking_policy == "none":
        return
    before = sum(
        answer.num_scheduled_tokens[i] + answer.num_draft_tokens[i]
        for i in scheduled_rows(answer)
        if not answer.prefill_mask[i]
    )
    room = min(
        limit(case.max_num_batched_tokens) - before, limit(case.max_context_length)
    )
    if room < case.chunk_unit_size:
        return
    for index in scheduled_rows(answer):
        if answer.prefill_mask[index] and not answer.is_last_chunk[index]:
            row = case.rows[index]
            end = row.num_computed_tokens + answer.num_scheduled_tokens[index]
            assert end in points_of(row) or end % case.chunk_unit_size == 0


def check_progress(case, answer):
    """Something runs, or every row that could run is too large for the limits."""
    if case.rules != "jaxsched" or answer.num_seqs or not case.max_num_batched_tokens:
        return
    for row, reason in zip(case.rows, answer.reason, strict=True):
        assert reason == (exclusion(case, row) or records.TOO_LARGE)


def check_plan(case, answer):
    """Everything above."""
    if answer.error:
        assert answer.num_seqs == answer.num_batched_tokens == 0
    check_bookkeeping(case, answer)
    check_limits(case, answer)
    check_points(case, answer)
    check_alignment(case, answer)
    check_progress(case, answer)
