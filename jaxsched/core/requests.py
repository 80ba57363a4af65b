"""`RequestTable`: the active requests as arrays, in first-come order.

Shape letters: R rows, S explicit snapshot points of a row, C points of its caller.
"""

import dataclasses

import jax

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RequestTable:
    """R requests in first-come order; rows of `Phase.EMPTY` are padding.

    Build one with `jaxsched.request_table`, which checks every value. All counts are
    tokens unless said otherwise. A prefill is at its *first chunk* while
    `num_computed_tokens == num_cached_tokens`.
    """

    request_id: Array  # i32[R]  the caller's name for the row, NO_ID on padding
    phase: Array  # i32[R]  a Phase
    num_prompt_tokens: Array  # i32[R]
    num_computed_tokens: Array  # i32[R]  prefix whose cache entries are written
    num_cached_tokens: Array  # i32[R]  of those, taken from the prefix cache
    num_reusable_tokens: Array  # i32[R]  estimate; counts on the first chunk only
    num_output_tokens: Array  # i32[R]  sampled so far
    max_new_tokens: Array  # i32[R]
    num_draft_tokens: Array  # i32[R]  proposed for the next step
    num_encoder_tokens: Array  # i32[R]  output length of its encoder input
    beam_width: Array  # i32[R]
    lora_id: Array  # i32[R]  adapter slot, at most MAX_LORA_ID; NO_ID: none
    priority: Array  # i32[R]  larger is more urgent
    arrival: Array  # i32[R]  milliseconds on the caller's clock
    in_flight: Array  # bool[R]  held by a step that has not returned
    hold_reason: Array  # i32[R]  a Reason that keeps the row out; SCHEDULED: none
    snapshot_interval: Array  # i32[R]  periodic points; 0: none
    requested_points: Array  # i32[R, C]  the caller's own points, NO_ID padded
    snapshot_points: Array  # i32[R, S]  published explicit points, NO_ID padded

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return self.phase.shape[0]

    @property
    def num_remaining_tokens(self) -> Array:
        """Prompt tokens still to compute, i32[R]."""
        return self.num_prompt_tokens - self.num_computed_tokens

    def replace(self, **fields: Array) -> "RequestTable":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)
