"""What a finished step does to the rows: phases and counters move on."""

import copy


def advance(case, answer, accepted=None, drafts=None, stopped=None):
    """A new `records.Case` with its rows moved on by one answered step.

    Args:
      accepted: draft tokens the model confirmed, a list entry a row; none if absent.
      drafts: drafts proposed for the next step, a list entry a row; none if absent.
      stopped: rows whose answer ended on its own, a list entry a row.
    """
    size = len(case.rows)
    accepted = accepted or [0] * size
    drafts = drafts or [0] * size
    stopped = stopped or [False] * size
    following = copy.deepcopy(case)
    for index, row in enumerate(following.rows):
        sampled = 0
        if answer.encode_mask[index]:
            row.phase = "prefill"
        elif answer.prefill_mask[index]:
            row.num_computed_tokens += answer.num_scheduled_tokens[index]
            row.num_reusable_tokens = 0
            if row.num_computed_tokens == row.num_prompt_tokens:
                row.phase = "decode"
                sampled = 1
                row.num_draft_tokens = drafts[index]
        elif answer.decode_mask[index]:
            sampled = 1 + accepted[index]
            row.num_computed_tokens += sampled
            row.num_draft_tokens = drafts[index]
        row.num_output_tokens += sampled
        done = row.num_output_tokens >= row.max_new_tokens or stopped[index]
        if sampled and done:
            row.phase = "finished"
    return following
