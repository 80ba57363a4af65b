"""What a finished step does to the rows: phases and counters move on."""

import copy

from oracles.records import SCHEDULED


def advance(case, answer, accepted=None, drafts=None, stopped=None):
    """A new `records.Case` with its rows moved on by one answered step.

    Args:
      accepted: draft tokens the model confirmed, a list entry a row; none if absent.
      drafts: drafts proposed for the next step, a list entry a row; if absent, rows
        that sampled have none.
      stopped: rows that met a stop token, a list entry a row; none if absent.
    """
    following = copy.deepcopy(case)
    for index, row in enumerate(following.rows):
        sampled = 0
        ran = answer.reason[index] == SCHEDULED
        if answer.encode_mask[index]:
            row.phase = "prefill"
        elif answer.prefill_mask[index]:
            row.num_computed_tokens += answer.num_scheduled_tokens[index]
            row.num_reusable_tokens = 0
            if answer.is_last_chunk[index]:
                row.phase = "decode"
                sampled = 1
        elif answer.decode_mask[index]:
            sampled = 1 + (accepted[index] if accepted else 0)
            row.num_computed_tokens += sampled
        row.num_output_tokens += sampled
        if drafts:
            row.num_draft_tokens = drafts[index]
        elif sampled:
            row.num_draft_tokens = 0
        if sampled and row.num_output_tokens >= row.max_new_tokens:
            row.phase = "finished"
        if ran and stopped and stopped[index]:
            row.phase = "finished"
    return following
