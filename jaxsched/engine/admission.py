"""Requests into rows: what the cache has of a prompt, its blocks, its restored state.

Shape letters: A rows, L tokens of a row, K stop tokens, C requested points of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.cache.hybrid import (
    Match,
    MissReason,
    Placed,
    Prompts,
    lookup,
    release,
    reserve,
)
from jaxsched.core.config import NO_ID, Phase
from jaxsched.core.masking import first_true, iota
from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import Copies, ModelStep
from jaxsched.engine.state import EngineState

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A request that asks to run."""

    tokens: Array  # i32[L]  prompt, and the answer so far where it was preempted
    num_prompt_tokens: Array  # i32[]
    num_known: Array  # i32[]  prompt and answer so far
    max_new_tokens: Array  # i32[]
    priority: Array  # i32[]
    number: Array  # i32[]  of the submission
    points: Array  # i32[C - 2]  snapshot points of its own, NO_ID padded
    stop_tokens: Array  # i32[K]  NO_ID padded
    temperature: Array  # f32[]
    top_k: Array  # i32[]
    top_p: Array  # f32[]
    seed: Array  # u32[]
    reads: Array  # bool[]  reuses what is cached, and is kept for others


def admit(
    model: ModelStep,
    config: EngineConfig,
    state: EngineState,
    candidate: Candidate,
    now: Array,
) -> tuple[EngineState, Array]:
    """Gives a request a row, its blocks and its state, or changes nothing.

    Args:
      model, config: static.
      state: of the engine, donated.
      candidate: the request.
      now: i32[], milliseconds.

    Returns:
      The state and i32[6]: whether it was admitted, its row, cached tokens, tokens
      matched by keys, tokens matched by states, and the reason why not more.
    """
    hybrid, cache = config.hybrid(), state.cache
    row = first_true(~cache.rows.is_used)
    prompts = Prompts(
        tokens=candidate.tokens[None, :],
        length=candidate.num_prompt_tokens[None],
        lora_id=jnp.full(1, NO_ID, jnp.int32),
        salt=jnp.zeros(1, jnp.int32),
        reads=candidate.reads[None] & config.prefix_caching,
    )
    match = lookup(cache, prompts, hybrid)
    whole = candidate.num_prompt_tokens + candidate.max_new_tokens
    target = candidate.num_prompt_tokens if config.grows else whole
    is_alone = ~jnp.any(cache.rows.is_used)
    rows = jnp.where(row < config.max_num_seqs, row, NO_ID)[None]

    def attempt(carry: tuple) -> tuple:
        cache, match, _, tries = carry
        match = jax.tree.map(
            lambda old, new: jnp.where(tries > 0, new, old), match, _without_hit(match)
        )
        cache, placed = reserve(cache, rows, prompts, match, target[None], now, hybrid)
        return cache, match, placed, tries + 1

    def again(carry: tuple) -> Array:
        _, _, placed, tries = carry
        # What a hit pins can be what is missing: then nothing would ever run.
        return (tries == 0) | (~placed.granted[0] & is_alone & (tries == 1))

    shapes = jax.eval_shape(attempt, (cache, match, None, jnp.int32(0)))[2]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    carry = (cache, match, nothing, jnp.int32(0))
    cache, match, placed, _ = lax.while_loop(again, attempt, carry)
    granted = placed.granted[0]
    state = _open_row(config, state, candidate, match, row, granted)
    state = state.replace(cache=cache, pools=model.copy(state.pools, _copies(placed)))
    answer = (
        *(granted, row, match.num_cached_tokens[0], match.num_kv_matched_tokens[0]),
        *(match.num_state_matched_tokens[0], match.miss_reason[0]),
    )
    return state, jnp.stack([value.astype(jnp.int32) for value in answer])


def _without_hit(match: Match) -> Match:
    """The same match with nothing to reuse: its blocks cannot all be held."""
    return dataclasses.replace(
        match,
        num_cached_tokens=jnp.zeros_like(match.num_cached_tokens),
        miss_reason=jnp.full_like(match.miss_reason, MissReason.NO_KV),
        block_ids=jnp.full_like(match.block_ids, NO_ID),
        entry=jnp.full_like(match.entry, NO_ID),
    )


def _copies(placed: Placed) -> Copies:
    """The open block and the state of a hit; a row without one starts from slot 0."""
    return Copies(
        page_source=placed.block_source,
        page_target=placed.block_target,
        slot_source=placed.state_source,
        slot_target=placed.state_target,
    )


def _open_row(
    config: EngineConfig,
    state: EngineState,
    candidate: Candidate,
    match: Match,
    row: Array,
    granted: Array,
) -> EngineState:
    at = jnp.where(granted, row, config.max_num_seqs)

    def put(field: Array, value: Array | int) -> Array:
        return field.at[at].set(jnp.asarray(value, field.dtype), mode="drop")

    learned = jnp.stack([match.branch_point[0], match.ghost_point[0]])
    learned = jnp.where(config.branch_snapshots & (learned > 0), learned, NO_ID)
    cached = match.num_cached_tokens[0]
    table, sampling = state.table, state.sampling
    values = {
        "request_id": candidate.number,
        "phase": Phase.PREFILL,
        "num_prompt_tokens": candidate.num_prompt_tokens,
        "num_computed_tokens": cached,
        "num_cached_tokens": cached,
        "num_reusable_tokens": 0,
        "num_output_tokens": 0,
        "max_new_tokens": candidate.max_new_tokens,
        "num_draft_tokens": 0,
        "priority": candidate.priority,
        "arrival": candidate.number,
        "requested_points": jnp.concatenate([candidate.points, learned]),
    }
    fields = {name: put(getattr(table, name), value) for name, value in values.items()}
    drawing = ("temperature", "top_k", "top_p", "seed")
    return state.replace(
        table=table.replace(**fields),
        tokens=put(state.tokens, candidate.tokens),
        num_known=put(state.num_known, candidate.num_known),
        stop_tokens=put(state.stop_tokens, candidate.stop_tokens),
        sampling=dataclasses.replace(
            sampling,
            **{
                name: put(getattr(sampling, name), getattr(candidate, name))
                for name in drawing
            },
        ),
    )


def leave(config: EngineConfig, state: EngineState, gone: Array) -> EngineState:
    """Takes rows out; what they have committed stays cached.

    Args:
      config: static.
      state: of the engine.
      gone: bool[A].
    """
    rows = jnp.where(gone, iota(gone.shape[0]), NO_ID)
    table = state.table
    return state.replace(
        cache=release(state.cache, rows, config.hybrid()),
        table=table.replace(
            phase=jnp.where(gone, Phase.EMPTY, table.phase),
            request_id=jnp.where(gone, NO_ID, table.request_id),
        ),
    )
