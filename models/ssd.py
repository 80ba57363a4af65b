"""The Mamba-2 scan: chunked for prefill, one token at a time for decoding.

Source: Dao and Gu 2024 (arXiv:2405.21060), section 6: inside a chunk a masked matrix
product, between chunks a recurrence over states.

The chunk grid is *absolute*: a cell is one interval [kQ, (k+1)Q) of one request,
whatever cuts the schedule made. What keeps the bits of a token independent of the
schedule:

* every cell has Q columns; a column that is not there has dt = 0, so it decays by
  exactly 1 and adds exactly 0, and no column's value depends on later ones;
* states pass from cell to cell strictly in sequence, in float32. A tree over cells, or
  one matrix over all of them, would round in an order that depends on how many there
  are.

Shape letters: C cells, Q columns of a cell, G groups, J heads of a group, H = G * J,
P head dim, N state dim, R decoding rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.models.primitives import float32_einsum

Array = jax.Array

# Steps of the loop over cells that are compiled as one. With more than one, each copy
# of the body is compiled by itself, and one may round a product that another fuses
# with its sum: a state's bits would depend on its cell's number.
_UNROLL = 1


def scan_cells(
    x: Array,
    dt: Array,
    rates: Array,
    keys: Array,
    queries: Array,
    loaded: Array,
    is_first: Array,
) -> tuple[Array, Array, Array]:
    """Outputs of every column, and the state at both ends of every cell.

    Args:
      x: [C, Q, G, J, P] inputs.
      dt: f32[C, Q, H] time steps, 0 on columns that are not there.
      rates: f32[H], the negative A.
      keys: [C, Q, G, N], the published B.
      queries: [C, Q, G, N], the published C.
      loaded: f32[C, H, P, N], read where `is_first`: the state before the cell.
      is_first: bool[C]; elsewhere a cell continues the one before it.

    Returns:
      f32[C, Q, G, J, P] outputs without the skip term, f32[C, H, P, N] states before
      each cell, and f32[C, H, P, N] states after each cell's last filled column.
    """
    cells, columns, groups, per_group, _ = x.shape
    shape = (cells, columns, groups, per_group)
    logs = jnp.cumsum(dt * rates[None, None, :], axis=1)
    x = x.astype(jnp.float32) * dt.reshape(shape)[..., None]
    inside = _inside(x, logs.reshape(shape), keys, queries)
    to_end = jnp.exp(logs[:, -1:] - logs).reshape(shape)
    added = float32_einsum("csgn,csgjp->cgjpn", keys, x * to_end[..., None])
    added = added.reshape(loaded.shape)
    before, after = _pass_states(loaded, added, jnp.exp(logs[:, -1]), is_first)
    states = before.reshape(cells, groups, per_group, *before.shape[2:])
    carried = float32_einsum("clgn,cgjpn->clgjp", queries, states)
    out = inside + carried * jnp.exp(logs).reshape(shape)[..., None]
    return out, before, after


def _inside(x: Array, logs: Array, keys: Array, queries: Array) -> Array:
    """What the columns of a cell give each other; x is multiplied by dt already."""
    scores = float32_einsum("clgn,csgn->cgls", queries, keys)
    logs = logs.transpose(0, 2, 3, 1)  # [C, G, J, Q]
    columns = logs.shape[-1]
    causal = jnp.tril(jnp.ones((columns, columns), bool))[None, None, None]
    # Masked before the exponential: above the diagonal it would overflow.
    gaps = jnp.where(causal, logs[..., :, None] - logs[..., None, :], -jnp.inf)
    weights = scores[:, :, None] * jnp.exp(gaps)
    return float32_einsum("cgjls,csgjp->clgjp", weights, x)


def _pass_states(
    loaded: Array, added: Array, decay: Array, is_first: Array
) -> tuple[Array, Array]:
    """States before and after every cell: h * decay + added, cell after cell."""

    def step(previous: Array, cell: tuple[Array, ...]) -> tuple[Array, Array]:
        first, start, more, keep = cell
        start = jnp.where(first, start, previous)
        end = start * keep[:, None, None] + more
        return end, end

    zeros = jnp.zeros_like(loaded[0])
    _, after = lax.scan(step, zeros, (is_first, loaded, added, decay), unroll=_UNROLL)
    # A selection, not a second evaluation of the same sum, which might be rounded
    # differently (as one fused multiply-add, or as two operations).
    shifted = jnp.concatenate([zeros[None], after[:-1]])
    return jnp.where(is_first[:, None, None, None], loaded, shifted), after


def step_rows(
    x: Array, dt: Array, rates: Array, keys: Array, queries: Array, state: Array
) -> tuple[Array, Array]:
    """One token for each of R requests.

    Args:
      x: [R, G, J, P]; dt: f32[R, H]; rates: f32[H]; keys, queries: [R, G, N].
      state: f32[R, H, P, N], after the token before.

    Returns:
      f32[R, G, J, P] outputs without the skip term, and f32[R, H, P, N] states.
    """
    rows, groups, per_group, _ = x.shape
    x = x.astype(jnp.float32) * dt.reshape(rows, groups, per_group, 1)
    added = x[..., None] * keys.astype(jnp.float32)[:, :, None, None, :]
    decay = jnp.exp(dt * rates[None])[:, :, None, None]
    state = state * decay + added.reshape(state.shape)
    grouped = state.reshape(rows, groups, per_group, *state.shape[2:])
    return float32_einsum("rgn,rgjpn->rgjp", queries, grouped), state
