"""What the engine asks of a model: a few pure functions over pools that it never reads.

`jaxsched.models.engine_step` makes a `ModelStep` of a hybrid model; any other model
that keeps keys in pages and states in slots can be served by writing these functions.

Shape letters: A rows, L tokens of a row, B blocks of a row, P points of a row,
V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """How each row's next token is drawn from its logits."""

    temperature: Array  # f32[A]  0: the likeliest token
    top_k: Array  # i32[A]  only so many of the likeliest; 0: all
    top_p: Array  # f32[A]  only the likeliest whose weights make up this share
    seed: Array  # u32[A]  with the position, the whole source of chance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepWork:
    """What every row does in a mixed step; rows with `count` 0 do nothing."""

    token_ids: Array  # i32[A, L]  by absolute position, prompt and answer
    start: Array  # i32[A]  first position to compute
    count: Array  # i32[A]  tokens; 1 where decoding
    is_decode: Array  # bool[A]
    is_last: Array  # bool[A]  a prefill that reaches its prompt's end
    block_tables: Array  # i32[A, B]  pages; the number of pages: none
    load_slots: Array  # i32[A]  state to start from; 0: zeros
    store_slots: Array  # i32[A]  where the state after the step goes
    snapshot_points: Array  # i32[A, P]  positions in (start, start + count], or NO_ID
    snapshot_slots: Array  # i32[A, P]  where their states go, or NO_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowWork:
    """One token of every row that decodes."""

    token_ids: Array  # i32[A]
    positions: Array  # i32[A]
    is_active: Array  # bool[A]  the others must be left as they are
    block_tables: Array  # i32[A, B]
    slots: Array  # i32[A]  state to read and to write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Copies:
    """Copies between pages and between slots; targets past the end: none."""

    page_source: Array  # i32[C]
    page_target: Array  # i32[C]
    slot_source: Array  # i32[C]
    slot_target: Array  # i32[C]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """What a mixed step gives back besides the pools."""

    logits: Array  # f32[A, V]  of each row's last token; anything where not asked for
    num_tokens: Array  # i32[]  that the model has really computed
    num_missed: Array  # i32[]  pieces of work that found no room; must be 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelStep:
    """A model as the engine sees it; everything but sizes is a pure function.

    Args:
      vocab_size: token ids are below it.
      weights: pytree that is handed to `run` and `decode`.
      init_pools: (num_pages, page_size, num_slots) -> pools.
      run: (weights, pools, StepWork) -> (pools, StepResult). Slot 0 is never written.
        A state filed at a point must be what a prefill continues from, at that very
        point; the state after a prompt's last chunk what decoding continues from.
      decode: (weights, pools, RowWork) -> (pools, f32[A, V] logits).
      copy: (pools, Copies) -> pools.
      sample: (f32[A, V] logits, i32[A] positions of the tokens that gave them,
        Sampling) -> i32[A] tokens; a row's token depends on nothing of other rows.
      chunk_size, num_cells: a mixed step has room for so many intervals
        [k * chunk_size, (k + 1) * chunk_size) of prompts; num_cells=0: no such limit.
    """

    vocab_size: int
    weights: Any
    init_pools: Callable[[int, int, int], Any]
    run: Callable[[Any, Any, StepWork], tuple[Any, StepResult]]
    decode: Callable[[Any, Any, RowWork], tuple[Any, Array]]
    copy: Callable[[Any, Copies], Any]
    sample: Callable[[Array, Array, Sampling], Array]
    chunk_size: int = 1
    num_cells: int = 0
