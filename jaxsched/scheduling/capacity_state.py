"""Types of admission: policies, verdicts, the pools as arrays, the answer as arrays.

Shape letters: R rows of the request table, W attention windows, each with a pool.
"""

import dataclasses
import enum

import chex
import jax
import jax.numpy as jnp

from jaxsched.core.config import Rules
from jaxsched.core.requests import RequestTable

Array = jax.Array

MAX_ROWS = 2**15
"""Most rows of one pass: running sums of block counts stay exact up to here."""

MAX_POOL = 2**29
"""Largest finite pool, and most blocks of one row, that the constructors accept."""


class CapacityPolicy(enum.StrEnum):
    """Which requests may hold cache memory in the next step."""

    MAX_REQUESTS = "max_requests"  # by count alone
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"  # who is admitted can finish
    STATIC_BATCH = "static_batch"  # all of a batch finish before the next is admitted
    MAX_UTILIZATION = "max_utilization"  # what fits now; later ones may be preempted


class Verdict(enum.IntEnum):
    """What admission decided about a row; the values of `CapacityResult.verdict`."""

    ADMITTED = 0
    EMPTY_ROW = 1
    WRONG_PHASE = 2  # finished, or not known to the policy
    HELD = 3  # kept out by `RequestTable.hold_reason`
    BATCH_FULL = 4  # max_num_requests rows are in
    NO_BLOCKS = 5  # a pool is too full at the moment
    NO_LORA_PAGES = 6  # its adapter does not fit at the moment
    BEHIND_BLOCKED = 7  # an earlier row did not fit, and rows are taken in order
    PREFIX_DEFERRED = 8  # another row computes the block that it would compute first
    STATIC_BATCH = 9  # the running batch has to finish first
    PREEMPTED = 10  # it gives its memory back and starts again later
    TOO_LARGE = 11  # no pass can ever take it: raise the pool
    REFUSED_STEP = 12  # the whole pass was refused, see `CapacityResult.error`


class CapacityError(enum.IntEnum):
    """Inputs on which the `tensorrt_llm` rules raise."""

    NONE = 0
    ENCODER_WITHOUT_CROSS_POOL = 1

    @property
    def message(self) -> str:
        """What went wrong, in words, with the thing to change."""
        return {
            CapacityError.NONE: "",
            CapacityError.ENCODER_WITHOUT_CROSS_POOL: (
                "a request waits for its encoder input but there is no pool for "
                "cross attention: set free_cross_blocks"
            ),
        }[self]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Static choices of admission. Hashable: pass it as a static argument.

    Args:
      rules: `jaxsched` (default) or `tensorrt_llm`, bit for bit.
      policy: see `CapacityPolicy`.
      prefix_deferral: hold back a first chunk whose first block another row is about
        to compute. Needs `new_block_key`; with several windows, as published, never.
      lora: whether adapters take pages. Turn it off where none are served: it costs
        a sort.

    Raises:
      ValueError: on an unknown name.
    """

    rules: Rules = Rules.JAXSCHED
    policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    prefix_deferral: bool = False
    lora: bool = False

    def __post_init__(self):
        for field, kind in (("rules", Rules), ("policy", CapacityPolicy)):
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, kind(value))
            except ValueError:
                names = ", ".join(repr(str(name)) for name in kind)
                raise ValueError(
                    f"{field} must be one of {names}, got {value!r}"
                ) from None
        for field in ("prefix_deferral", "lora"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise ValueError(f"{field} must be True or False, got {value!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapacityState:
    """What the pools have and what the rows hold. Build it with `capacity_state`.

    A pool without a limit has UNLIMITED free. `allocated_blocks` count per beam;
    under the `jaxsched` rules preempting a row gives back that times its beam width,
    under `tensorrt_llm` just that, as published.
    """

    allocated_blocks: Array  # i32[R, W]  blocks held, per beam
    allocated_cross_blocks: Array  # i32[R]  cross-attention blocks held
    allocated_state_slots: Array  # i32[R]  recurrent-state slots held
    new_state_slots: Array  # i32[R]  state slots a row takes when it is admitted
    num_referenced_blocks: Array  # i32[R]  prompt blocks in the cache that others hold
    new_block_key: Array  # i32[R]  names the first block it would compute, or NO_ID
    lora_pages: Array  # i32[R]  pages of its adapter
    num_windows: Array  # i32[]  windows in use; pools of the others have no limit
    window: Array  # i32[W]  tokens that attention sees; UNLIMITED: all
    free_blocks: Array  # i32[W]
    total_blocks: Array  # i32[W]
    free_cross_blocks: Array  # i32[]
    total_cross_blocks: Array  # i32[]
    has_cross_pool: Array  # bool[]
    free_state_slots: Array  # i32[]
    total_state_slots: Array  # i32[]
    max_lora_pages: Array  # i32[]
    block_size: Array  # i32[]  tokens
    max_num_requests: Array  # i32[]
    two_step_lookahead: Array  # bool[]  a decode reserves its next two steps

    def replace(self, **fields: Array) -> "CapacityState":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapacityResult:
    """The decision of one pass, one entry a row of the request table.

    A row is in exactly where `verdict == Verdict.ADMITTED`; then it is either
    `admitted` or, waiting for a transferred cache, `disagg_decode_init`.
    """

    admitted: Array  # bool[R]
    disagg_decode_init: Array  # bool[R]
    preempted: Array  # bool[R]  must release what they hold and start again
    verdict: Array  # i32[R]  a Verdict
    order: Array  # i32[R]  rows that are in, in output order, then NO_ID
    preemption_order: Array  # i32[R]  preempted rows in output order, then NO_ID
    required_blocks: Array  # i32[R, W]  blocks that the row needs of empty pools
    required_cross_blocks: Array  # i32[R]
    required_state_slots: Array  # i32[R]
    error: Array  # i32[]  a CapacityError; never set by the jaxsched rules


_ROW_FIELDS = frozenset(
    ("allocated_cross_blocks", "allocated_state_slots", "new_state_slots")
    + ("num_referenced_blocks", "new_block_key", "lora_pages")
)
_WINDOW_FIELDS = frozenset(("window", "free_blocks", "total_blocks"))
_FLAGS = frozenset(("has_cross_pool", "two_step_lookahead"))


def check_capacity_state(state: CapacityState, table: RequestTable) -> None:
    """Raises ValueError unless the state's shapes and dtypes fit the table.

    Trace time only: it costs nothing at run time.
    """
    rows = table.num_rows
    if rows > MAX_ROWS:
        raise ValueError(f"the table has {rows} rows, admission takes {MAX_ROWS}")
    windows = state.window.shape[0] if state.window.ndim == 1 else None
    for field in dataclasses.fields(state):
        name, shape = field.name, ()
        if name == "allocated_blocks":
            shape = (rows, windows)
        elif name in _ROW_FIELDS:
            shape = (rows,)
        elif name in _WINDOW_FIELDS:
            shape = (windows,)
        dtype = jnp.bool_ if name in _FLAGS else jnp.int32
        array = getattr(state, name)
        try:
            chex.assert_shape(array, shape)
            chex.assert_type(array, dtype)
        except (AssertionError, AttributeError) as wrong:
            got = f"{getattr(array, 'dtype', type(array))}{getattr(array, 'shape', '')}"
            raise ValueError(
                f"CapacityState.{name} must be {jnp.dtype(dtype).name}{list(shape)}, "
                f"got {got}"
            ) from wrong
