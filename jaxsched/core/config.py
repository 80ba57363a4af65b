"""Sentinels, enumerations and the static configuration of the scheduler.

Static means: hashable, part of the compilation key. Only choices that change the
*shape of the program* live here. Everything people sweep (budgets, unit, interval) is
an array in `jaxsched.core.plan.Budget` or in the request table, so that one compiled
program serves every value of it.
"""

import dataclasses
import enum

NO_ID = -1
"""Reads as "none". Never write with it: `.at[-1]` is the last row."""

UNLIMITED = 2**31 - 1
"""A token budget or a context limit that never binds."""

MAX_COUNT = 2**30 - 2
"""Largest finite token count, length or budget that the constructors accept.

The planner adds two counts before it compares them, so anything larger could pass
int32. Larger values are refused where they enter, never wrapped.
"""


class Phase(enum.IntEnum):
    """Where a request stands; the values of `RequestTable.phase`."""

    EMPTY = 0  # a padding row
    ENCODE = 1  # its encoder input has not been run
    PREFILL = 2  # prompt tokens remain to be computed
    DECODE = 3  # one token (per beam) a step
    DECODE_TO_COMPLETE = 4  # its last step is under way; never batched again
    FINISHED = 5
    DISAGG_DECODE_INIT = 6  # waits for a transferred cache


class Reason(enum.IntEnum):
    """Why a row got nothing in a step; the values of `Plan.reason`."""

    SCHEDULED = 0  # it got something
    EMPTY_ROW = 1
    WRONG_PHASE = 2  # finished, completing, or not schedulable in this configuration
    IN_FLIGHT = 3  # an earlier step that holds the row has not returned
    NO_BUDGET = 4  # the token budget was used up
    BELOW_UNIT = 5  # tokens were left, too few to reach the next unit boundary
    BATCH_FULL = 6  # max_num_seqs rows were taken
    BEAM_WIDTH = 7  # the batch decodes with another beam width
    BEHIND_BLOCKED = 8  # an earlier row did not fit, and rows are taken in order
    TOO_LARGE = 9  # no step of this budget can ever take it: raise the limit
    WAITING_FOR_ENCODER = 10  # held: its encoder output is not there yet
    NOT_ADMITTED = 11  # held: no room in the cache
    HELD = 12  # held by the caller
    PLAN_ERROR = 13  # the whole step was refused, see Plan.error


class PlanError(enum.IntEnum):
    """Inputs on which the `tensorrt_llm` rules raise; the values of `Plan.error`."""

    NONE = 0
    CONTEXT_BELOW_UNIT = 1  # FORCE_CHUNK with max_context_length < chunk_unit_size
    ABOVE_CONTEXT_LENGTH = 2  # an encoder input or un-chunked prompt over the limit

    @property
    def message(self) -> str:
        """What went wrong, in words, with the thing to change."""
        return {
            PlanError.NONE: "",
            PlanError.CONTEXT_BELOW_UNIT: (
                "max_context_length is below chunk_unit_size, so force_chunk can cut "
                "nothing: raise max_context_length or lower chunk_unit_size"
            ),
            PlanError.ABOVE_CONTEXT_LENGTH: (
                "an encoder input or an un-chunked prompt is longer than "
                "max_context_length: raise it or choose a chunking policy"
            ),
        }[self]


class Rules(enum.StrEnum):
    """Which rule set a plan follows."""

    JAXSCHED = "jaxsched"
    TENSORRT_LLM = "tensorrt_llm"


class ChunkingPolicy(enum.StrEnum):
    """How the tokens left after decoding are dealt to the prefills."""

    NONE = "none"
    FORCE_CHUNK = "force_chunk"
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class SnapshotMode(enum.StrEnum):
    """How a pending snapshot point is honoured."""

    CUT = "cut"  # the chunk ends there
    EMIT = "emit"  # the chunk may run on, the model returns the state at the point


class RowWalk(enum.StrEnum):
    """How rows that compete for a budget are walked; the plans are the same."""

    PARALLEL = "parallel"  # running sums, no loop over rows: for accelerators
    SEQUENTIAL = "sequential"  # a scan over the rows: several times faster on a CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Static choices of the planner. Hashable: pass it as a static argument.

    Args:
      rules: `jaxsched` (default) or `tensorrt_llm`, the published Python scheduler
        of TensorRT-LLM after PR #16427, bit for bit.
      chunking_policy: see `ChunkingPolicy`.
      snapshot_mode: `cut` or `emit`; `tensorrt_llm` rules know only `cut`.
      max_emit_points: inner points that one chunk may run past in `emit` mode, the
        width of `Plan.emit_points`. Ignored, and kept at one column, in `cut` mode.
      encoder_decoder: whether rows in `Phase.ENCODE` can be scheduled.
      group_by_lora: whether the output order groups rows by adapter. It costs a
        sort; turn it off where no adapters are served (`jaxsched` rules only).
      row_walk: `parallel` (default) or `sequential`; see `RowWalk`.

    Raises:
      ValueError: on an unknown name or a combination that makes no sense.
    """

    rules: Rules = Rules.JAXSCHED
    chunking_policy: ChunkingPolicy = ChunkingPolicy.FORCE_CHUNK
    snapshot_mode: SnapshotMode = SnapshotMode.CUT
    max_emit_points: int = 8
    encoder_decoder: bool = False
    group_by_lora: bool = True
    row_walk: RowWalk = RowWalk.PARALLEL

    def __post_init__(self):
        _coerce(self, "rules", Rules)
        _coerce(self, "chunking_policy", ChunkingPolicy)
        _coerce(self, "snapshot_mode", SnapshotMode)
        _coerce(self, "row_walk", RowWalk)
        emit = self.snapshot_mode == SnapshotMode.EMIT
        if not isinstance(self.max_emit_points, int) or self.max_emit_points < 1:
            raise ValueError(
                f"max_emit_points must be an integer >= 1, got {self.max_emit_points!r}"
            )
        if self.rules == Rules.TENSORRT_LLM and emit:
            raise ValueError(
                "snapshot_mode='emit' needs rules='jaxsched': "
                "the tensorrt_llm rules always cut"
            )
        if self.rules == Rules.TENSORRT_LLM and not self.group_by_lora:
            raise ValueError(
                "group_by_lora=False needs rules='jaxsched': "
                "the tensorrt_llm rules always sort by adapter"
            )

    @property
    def num_emit_columns(self) -> int:
        """Width of `Plan.emit_points`."""
        return self.max_emit_points if self.snapshot_mode == SnapshotMode.EMIT else 1


def _coerce(config, field: str, kind: type[enum.StrEnum]) -> None:
    """Accepts a plain string for an enumeration field of a frozen dataclass."""
    value = getattr(config, field)
    try:
        object.__setattr__(config, field, kind(value))
    except ValueError:
        names = ", ".join(repr(str(name)) for name in kind)
        raise ValueError(f"{field} must be one of {names}, got {value!r}") from None
