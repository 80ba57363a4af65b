"""`Budget`, what a step may spend, and `Plan`, what it spends it on.

Shape letters: R rows of the request table, E emitted positions of a row.
"""

import dataclasses

import jax

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """Limits of one step, as arrays: sweep them under `jax.vmap`.

    Build one with `jaxsched.budget`, which checks the values against each other.
    """

    max_num_batched_tokens: Array  # i32[]  UNLIMITED: no limit
    max_num_seqs: Array  # i32[]  rows
    chunk_unit_size: Array  # i32[]  tokens; in practice the KV block size
    max_context_length: Array  # i32[]  tokens of one chunk; UNLIMITED: no limit

    def replace(self, **fields: Array) -> "Budget":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What one step runs: one row for each row of the request table.

    A row got something exactly where `reason == Reason.SCHEDULED`.
    """

    num_scheduled_tokens: Array  # i32[R]  chunk, beam width, or encoder tokens
    num_draft_tokens: Array  # i32[R]  draft tokens kept, on top of the scheduled ones
    is_last_chunk: Array  # bool[R]  a prefill that reaches its prompt's end
    snapshot_point: Array  # i32[R]  chunk end if a state is to be filed there, or NO_ID
    emit_points: Array  # i32[R, E]  inner points passed, ascending, NO_ID padded
    prefill_mask: Array  # bool[R]
    decode_mask: Array  # bool[R]
    encode_mask: Array  # bool[R]
    preempted_mask: Array  # bool[R]
    order: Array  # i32[R]  rows in output order, then NO_ID
    reason: Array  # i32[R]  a Reason
    num_seqs: Array  # i32[]  rows that got something
    num_batched_tokens: Array  # i32[]  charged, held at MAX_COUNT + 1
    error: Array  # i32[]  a PlanError; never set by the jaxsched rules

    @property
    def scheduled_mask(self) -> Array:
        """Rows that got something, bool[R]."""
        return self.prefill_mask | self.decode_mask | self.encode_mask

    def replace(self, **fields: Array) -> "Plan":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)
