"""What both rule sets share: who may run, the reuse cost, points, output order."""

from oracles import records
from oracles.records import MAX_COUNT, NO_ID, SCHEDULED


def exclusion(case, row):
    """The reason that keeps a row out before any budget is looked at, or None."""
    if row.phase == "empty":
        return records.EMPTY_ROW
    schedulable = {"prefill", "decode"}
    if case.encoder_decoder:
        schedulable.add("encode")
    if row.phase not in schedulable:
        return records.WRONG_PHASE
    if row.phase == "prefill" and row.remaining <= 0:
        return records.WRONG_PHASE
    if row.in_flight:
        return records.IN_FLIGHT
    if row.hold_reason != SCHEDULED:
        return row.hold_reason
    return None


def reusable(case, row):
    """Tokens of the first chunk that the prefix cache is expected to supply."""
    if not row.at_first_chunk:
        return 0
    most = row.remaining if case.rules == "tensorrt_llm" else row.remaining - 1
    return max(0, min(row.num_reusable_tokens, most))


def chunk_cost(case, row, size):
    """Tokens that a chunk of `size` is charged: reuse shortens only the last part."""
    return min(size, row.remaining - reusable(case, row))


def shown_total(tokens):
    """A total as a plan states it: held just above the largest finite count."""
    return min(tokens, MAX_COUNT + 1)


def points_of(row):
    """Published points of a row in [1, prompt length], ascending, each once."""
    points = set()
    step = row.snapshot_interval
    if step > 0:
        points.update(range(step, row.num_prompt_tokens + 1, step))
    points.update(p for p in row.snapshot_points if 1 <= p <= row.num_prompt_tokens)
    return sorted(points)


def stop_after(row, skipped=0):
    """Where a chunk must end: the next point once `skipped` points have been passed.

    The prompt end where there are not that many points.
    """
    ahead = [p for p in points_of(row) if p > row.num_computed_tokens]
    return ahead[skipped] if len(ahead) > skipped else row.num_prompt_tokens


def place_prefill(case, answer, index, size, drafts):
    """Writes one scheduled prefill into the answer."""
    row = case.rows[index]
    end = row.num_computed_tokens + size
    answer.prefill_mask[index] = True
    answer.num_scheduled_tokens[index] = size
    answer.num_draft_tokens[index] = drafts
    answer.is_last_chunk[index] = end == row.num_prompt_tokens
    answer.reason[index] = SCHEDULED
    points = points_of(row)
    if end in points:
        answer.snapshot_point[index] = end
    if case.snapshot_mode == "emit":
        inner = [p for p in points if row.num_computed_tokens < p < end]
        for column, point in enumerate(inner[: case.max_emit_points]):
            answer.emit_points[index][column] = point


def place_decode(case, answer, index, drafts):
    """Writes one scheduled decode into the answer."""
    answer.decode_mask[index] = True
    answer.num_scheduled_tokens[index] = case.rows[index].beam_width
    answer.num_draft_tokens[index] = drafts
    answer.reason[index] = SCHEDULED


def place_encode(answer, index, tokens):
    """Writes one scheduled encoder input into the answer."""
    answer.encode_mask[index] = True
    answer.num_scheduled_tokens[index] = tokens
    answer.reason[index] = SCHEDULED


def set_order(case, answer):
    """Encodes, prefills that go on, prefills that end, decodes; adapters together."""
    size = len(case.rows)
    last = answer.is_last_chunk
    groups = [
        [i for i in range(size) if answer.encode_mask[i]],
        [i for i in range(size) if answer.prefill_mask[i] and not last[i]],
        [i for i in range(size) if answer.prefill_mask[i] and last[i]],
        [i for i in range(size) if answer.decode_mask[i]],
    ]
    order = []
    for group in groups:
        if case.group_by_lora:
            group = sorted(group, key=lambda i: case.rows[i].lora_id)
        order += group
    answer.num_seqs = len(order)
    answer.order = order + [NO_ID] * (size - len(order))
