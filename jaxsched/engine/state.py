"""`EngineState`: everything that lives on the device between two steps.

Row r of the request table is row r of the cache and runs in state slot r + 1 from its
admission to its end. The pools of the model are part of the state, so that one donated
argument updates all of it in place.

Shape letters: A rows, L tokens of a row, K stop tokens of a row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxsched.cache.hybrid_types import HybridCache, empty_cache
from jaxsched.core.build import request_table
from jaxsched.core.config import NO_ID
from jaxsched.core.requests import RequestTable
from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import ModelStep, Sampling

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngineState:
    """Tables, tokens and pools of the requests that run."""

    table: RequestTable  # `arrival` is the number of the submission
    cache: HybridCache
    tokens: Array  # i32[A, L]  by position: prompt, then answer
    num_known: Array  # i32[A]  tokens given at admission: more than the prompt's only
    # where a preempted request is computed again, whose answer must not change
    sampling: Sampling
    stop_tokens: Array  # i32[A, K]  NO_ID padded
    pools: Any

    def replace(self, **fields) -> "EngineState":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


def empty_state(model: ModelStep, config: EngineConfig) -> EngineState:
    """No requests, an empty cache, zeroed pools."""
    rows, hybrid = config.max_num_seqs, config.hybrid()
    return EngineState(
        table=request_table(
            [],
            num_rows=rows,
            num_points=config.num_points,
            num_requested_points=config.num_requested,
        ),
        cache=empty_cache(hybrid),
        tokens=jnp.zeros((rows, config.blocks_per_row * config.block_size), jnp.int32),
        num_known=jnp.zeros(rows, jnp.int32),
        sampling=Sampling(
            temperature=jnp.zeros(rows, jnp.float32),
            top_k=jnp.zeros(rows, jnp.int32),
            top_p=jnp.ones(rows, jnp.float32),
            seed=jnp.zeros(rows, jnp.uint32),
        ),
        stop_tokens=jnp.full((rows, config.max_stop_tokens), NO_ID, jnp.int32),
        pools=model.init_pools(config.num_blocks, config.block_size, hybrid.num_slots),
    )
