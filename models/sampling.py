"""Tokens from logits: greedy, temperature, top-k, top-p, one seed a request.

The noise of a token comes from its request's seed and its position and from nothing
else, so neither the schedule nor the other rows of a batch reach it. The maximum of
logits and Gumbel noise is a draw from their softmax (Gumbel-max), which needs no sum
over the vocabulary and no division by it.

Shape letters: A rows, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import iota
from jaxsched.engine.model import Sampling

Array = jax.Array


def sample(logits: Array, positions: Array, sampling: Sampling) -> Array:
    """One token a row; i32[A].

    With temperature 0 the likeliest token, the lowest id among equals. Else a draw
    from softmax(logits / temperature) over the tokens that top-k and then top-p leave:
    the k likeliest, and of those the fewest likeliest ones whose weights reach
    `top_p`. Among equals the lower id counts as likelier.

    Args:
      logits: f32[A, V].
      positions: i32[A] of the tokens that gave them.
      sampling: a value a row of each parameter.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        drawn = jax.vmap(_draw)(
            logits,
            positions,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.seed,
        )
        return jnp.where(sampling.temperature > 0, drawn, likeliest)

    # Sorting the vocabulary costs more than the rest: not for greedy rows alone.
    return lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: likeliest)


def gumbel_noise(seed: Array, position: Array, size: int) -> Array:
    """The noise on the logits of one token; f32[size]."""
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _draw(
    logits: Array,
    position: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    seed: Array,
) -> Array:
    size = logits.shape[0]
    # Any row passes here, greedy ones too, whose result is not used.
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    order = jnp.argsort(-scaled, stable=True)
    ranked = scaled[order]
    kept = iota(size) < jnp.where(top_k > 0, top_k, size)
    weights = jnp.where(kept, jnp.exp(ranked - ranked[0]), 0.0)
    before = jnp.cumsum(weights) - weights
    # The likeliest one stays, whatever the share.
    kept &= (before < top_p * jnp.sum(weights)) | (iota(size) == 0)
    noise = gumbel_noise(seed, position, size)
    scores = jnp.where(kept, ranked + noise[order], -jnp.inf)
    return order[jnp.argmax(scores)].astype(jnp.int32)
