"""Plain records of one planning case: rows, limits, and the answer of a plan.

No jax and no numpy here: the oracles are to be read, not to be fast. The numbers of
`Phase`, `Reason` and the sentinels repeat those of `jaxsched.core.config` on purpose;
a test holds the two against each other.
"""

import dataclasses

NO_ID = -1
UNLIMITED = 2**31 - 1
MAX_COUNT = 2**30 - 2

PHASES = (
    "empty",
    "encode",
    "prefill",
    "decode",
    "decode_to_complete",
    "finished",
    "disagg_decode_init",
)

SCHEDULED = 0
EMPTY_ROW = 1
WRONG_PHASE = 2
IN_FLIGHT = 3
NO_BUDGET = 4
BELOW_UNIT = 5
BATCH_FULL = 6
BEAM_WIDTH = 7
BEHIND_BLOCKED = 8
TOO_LARGE = 9
WAITING_FOR_ENCODER = 10
NOT_ADMITTED = 11
HELD = 12
PLAN_ERROR = 13

NO_ERROR = 0
CONTEXT_BELOW_UNIT = 1
ABOVE_CONTEXT_LENGTH = 2


@dataclasses.dataclass
class Row:
    """One request, named as in the case files; the default of each key is here."""

    id: int = NO_ID
    phase: str = "empty"
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_reusable_tokens: int = 0
    num_output_tokens: int = 0
    max_new_tokens: int = 1
    num_draft_tokens: int = 0
    num_encoder_tokens: int = 0
    beam_width: int = 1
    lora_id: int = NO_ID
    in_flight: bool = False
    hold_reason: int = SCHEDULED
    snapshot_interval: int = 0
    snapshot_points: list = dataclasses.field(default_factory=list)

    @property
    def remaining(self):
        return self.num_prompt_tokens - self.num_computed_tokens

    @property
    def at_first_chunk(self):
        return self.num_computed_tokens == self.num_cached_tokens


@dataclasses.dataclass
class Case:
    """Rows in queue order and the limits of one step."""

    rules: str
    chunking_policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_context_length: int
    chunk_unit_size: int
    encoder_decoder: bool
    snapshot_mode: str
    max_emit_points: int
    group_by_lora: bool
    rows: list


def read_row(request):
    """A `Row` from a request of a case file; unknown keys are an error."""
    values = dict(request)
    if values.get("lora_id", 0) is None:
        del values["lora_id"]
    return Row(**values)


def read_case(case):
    """A `Case` from the `input` of a case file, keys as in the case files' notes."""
    budget = case["max_num_batched_tokens"]
    context = case.get("max_context_length", budget)
    return Case(
        rules=case["rules"],
        chunking_policy=case["chunking_policy"],
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=UNLIMITED if budget is None else budget,
        max_context_length=UNLIMITED if context is None else context,
        chunk_unit_size=case["chunk_unit_size"],
        encoder_decoder=case.get("encoder_decoder", False),
        snapshot_mode=case.get("snapshot_mode", "cut"),
        max_emit_points=case.get("max_emit_points", 8),
        group_by_lora=case.get("group_by_lora", True),
        rows=[read_row(request) for request in case["requests"]],
    )


@dataclasses.dataclass
class Answer:
    """What a step runs, a list entry a row; the fields of `jaxsched.Plan`."""

    num_scheduled_tokens: list
    num_draft_tokens: list
    is_last_chunk: list
    snapshot_point: list
    emit_points: list
    prefill_mask: list
    decode_mask: list
    encode_mask: list
    preempted_mask: list
    order: list
    reason: list
    num_seqs: int = 0
    num_batched_tokens: int = 0
    error: int = NO_ERROR


def empty_answer(case):
    """An answer in which nothing runs; reasons are still to be filled in."""
    size = len(case.rows)
    columns = case.max_emit_points if case.snapshot_mode == "emit" else 1
    return Answer(
        num_scheduled_tokens=[0] * size,
        num_draft_tokens=[0] * size,
        is_last_chunk=[False] * size,
        snapshot_point=[NO_ID] * size,
        emit_points=[[NO_ID] * columns for _ in range(size)],
        prefill_mask=[False] * size,
        decode_mask=[False] * size,
        encode_mask=[False] * size,
        preempted_mask=[False] * size,
        order=[NO_ID] * size,
        reason=[None] * size,
    )


def golden_form(case, answer):
    """The `expected` form of the case files: ids in output order, or an error."""
    if answer.error:
        return {"error": True}
    form = {"encode": [], "prefill": [], "decode": []}
    for row in answer.order:
        if row == NO_ID:
            break
        name = case.rows[row].id
        if answer.encode_mask[row]:
            form["encode"].append(name)
        elif answer.decode_mask[row]:
            form["decode"].append(name)
        else:
            form["prefill"].append(
                {
                    "id": name,
                    "num_scheduled_tokens": answer.num_scheduled_tokens[row],
                    "num_draft_tokens": answer.num_draft_tokens[row],
                }
            )
    return form
