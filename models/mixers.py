"""The token mixers: Mamba-2 over pooled states, attention over the paged cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsched.models.batch import Batch
from jaxsched.models.config import AttentionConfig, MambaConfig
from jaxsched.models.conv import Cut, convolve, merge_carried, rows_to_store
from jaxsched.models.modules import Init, Streams, bias, declare, linear
from jaxsched.models.paged_attention import paged_attention
from jaxsched.models.parameters import attention_shapes, mamba_shapes
from jaxsched.models.pools import Pools
from jaxsched.models.primitives import gated_norm, matmul, rotate
from jaxsched.models.ssd import scan_cells, step_rows

Array = jax.Array


class StepContext(NamedTuple):
    """What every layer of a step reads, computed once from the batch."""

    batch: Batch
    cut: Cut
    cell_positions: Array  # i32[C, Q]
    cell_pages: tuple[Array, Array]  # i32[C, Q] page and offset that keys go to
    cell_num_keys: Array  # i32[C]
    row_pages: tuple[Array, Array]  # i32[R, 1]
    row_num_keys: Array  # i32[R]


class MambaMixer(nnx.Module):
    """The Mamba-2 mixer over states in a pool."""

    def __init__(self, config: MambaConfig, size: int, init: Init):
        self.config = config
        declare(self, mamba_shapes(config, size), init)

    def __call__(
        self, x: Streams, pools: Pools, index: int, step: StepContext
    ) -> tuple[Streams, Pools]:
        """Mixes both streams; `index` counts layers with recurrence."""
        cells, rows = x
        # Rows read what the cells have left: reading the pools as they came in would
        # keep them alive past the cells' writes, and cost a copy of every state. A row
        # starts from its own request's slot, which no cell writes.
        if cells is not None:
            cells, pools = self._cells(cells, pools, index, step)
        if rows is not None:
            rows, pools = self._rows(rows, pools, index, step)
        return Streams(cells, rows), pools

    def _cells(
        self, x: Array, pools: Pools, index: int, step: StepContext
    ) -> tuple[Array, Pools]:
        mamba, cut, batch = self.config, step.cut, step.batch
        shape = step.cell_positions.shape
        projected = matmul(x, self.in_proj.weight[...]).reshape(*shape, -1)
        z, raw = projected[..., : mamba.inner_size], projected[..., mamba.inner_size :]
        load = batch.cell_load_slot
        conv, tail = pools.conv[index, load], pools.tail[index, load]
        window, steps = merge_carried(raw, conv, tail, cut)
        width = mamba.conv_width - 1
        history = jnp.arange(-width, shape[1], dtype=jnp.int32)
        mixed = self._convolve(window, batch.cell_start[:, None] + history[None])
        inputs, keys, queries = self._split(mixed)
        columns = jnp.arange(shape[1], dtype=jnp.int32)[None]
        valid = (columns >= cut.lead[:, None]) & (columns < cut.fill[:, None])
        dt = jnp.where(valid[..., None], self._time_steps(steps), 0.0)
        out, start, end = scan_cells(
            inputs,
            dt,
            self._rates(),
            keys,
            queries,
            pools.ssm[index, load],
            cut.is_first,
        )
        out = self._finish(out, inputs, z).reshape(x.shape[0], -1)
        at, plain = batch.write_cell, batch.write_plain
        stored = rows_to_store(
            window[at],
            steps[at],
            cut.lead[at],
            batch.write_count,
            plain,
            pools.tail_size,
        )
        state = jnp.where(plain[:, None, None, None], end[at], start[at])
        where = (index, batch.write_slot)
        pools = pools.replace(
            ssm=pools.ssm.at[where].set(state, mode="drop"),
            conv=pools.conv.at[where].set(stored.conv, mode="drop"),
            tail=pools.tail.at[where].set(stored.tail, mode="drop"),
        )
        return linear(self.out_proj, out), pools

    def _rows(
        self, x: Array, pools: Pools, index: int, step: StepContext
    ) -> tuple[Array, Pools]:
        mamba, batch = self.config, step.batch
        projected = matmul(x, self.in_proj.weight[...])
        z, raw, steps = jnp.split(
            projected,
            [mamba.inner_size, mamba.inner_size + mamba.conv_channels],
            axis=-1,
        )
        load, store = batch.row_load_slot, batch.row_store_slot
        window = jnp.concatenate([pools.conv[index, load], raw[:, None]], axis=1)
        history = jnp.arange(1 - mamba.conv_width, 1, dtype=jnp.int32)
        positions = batch.row_positions[:, None] + history[None]
        mixed = self._convolve(window, positions)[:, 0]
        inputs, keys, queries = self._split(mixed)
        out, state = step_rows(
            inputs,
            self._time_steps(steps),
            self._rates(),
            keys,
            queries,
            pools.ssm[index, load],
        )
        pools = pools.replace(
            ssm=pools.ssm.at[index, store].set(state, mode="drop"),
            conv=pools.conv.at[index, store].set(window[:, 1:], mode="drop"),
            tail=pools.tail.at[index, store].set(
                jnp.zeros((), pools.tail.dtype), mode="drop"
            ),
        )
        return linear(self.out_proj, self._finish(out, inputs, z)), pools

    def _adjust(self, raw: Array, begin: int, scale: Array | float) -> Array:
        """Bias and multipliers of columns of the projection, from raw products."""
        if self.config.in_multiplier != 1.0:
            raw = raw * self.config.in_multiplier
        added = bias(self.in_proj)
        if added is not None:
            part = added[begin : begin + raw.shape[-1]]
            raw = raw + part.reshape((1,) * (raw.ndim - 1) + (-1,))
        return raw * scale

    def _convolve(self, window: Array, positions: Array) -> Array:
        mamba = self.config
        states = mamba.num_groups * mamba.state_size
        _, by_x, by_keys, by_queries, _ = mamba.multipliers
        scale = jnp.concatenate(
            [
                jnp.full((mamba.inner_size,), by_x, window.dtype),
                jnp.full((states,), by_keys, window.dtype),
                jnp.full((states,), by_queries, window.dtype),
            ]
        )
        window = self._adjust(window, mamba.inner_size, scale[None, None])
        # Before a sequence's start the convolution sees zeros, not the bias.
        window = jnp.where(positions[..., None] >= 0, window, jnp.zeros_like(window))
        return convolve(window, self.conv.weight[...], bias(self.conv))

    def _split(self, mixed: Array) -> tuple[Array, Array, Array]:
        """Inputs [..., G, J, P], keys and queries [..., G, N]."""
        mamba = self.config
        states = mamba.num_groups * mamba.state_size
        inputs, keys, queries = jnp.split(
            mixed, [mamba.inner_size, mamba.inner_size + states], axis=-1
        )
        lead, groups = mixed.shape[:-1], mamba.num_groups
        return (
            inputs.reshape(*lead, groups, -1, mamba.head_dim),
            keys.reshape(*lead, groups, -1),
            queries.reshape(*lead, groups, -1),
        )

    def _time_steps(self, raw: Array) -> Array:
        mamba = self.config
        begin = mamba.inner_size + mamba.conv_channels
        steps = self._adjust(raw, begin, mamba.multipliers[4]).astype(jnp.float32)
        offset = self.dt_bias[...].reshape((1,) * (raw.ndim - 1) + (-1,))
        return jnp.clip(jax.nn.softplus(steps + offset), *mamba.time_step_limit)

    def _rates(self) -> Array:
        return -jnp.exp(self.A_log[...])

    def _finish(self, out: Array, inputs: Array, z: Array) -> Array:
        """Skip term, gate and norm; [..., inner] in the dtype of z."""
        mamba = self.config
        lead = out.shape[:-3]
        skip = self.D[...].reshape((1,) * len(lead) + (*out.shape[-3:-1], 1))
        out = out + skip * inputs.astype(jnp.float32)
        weight = None if mamba.gate == "gate_only" else self.norm.weight[...]
        z = self._adjust(z, 0, mamba.multipliers[0])
        normed = gated_norm(
            out.reshape(*lead, mamba.inner_size),
            z,
            weight,
            gate=mamba.gate,
            groups=mamba.num_groups,
            eps=mamba.norm_eps,
        )
        return normed.astype(z.dtype)


class Attention(nnx.Module):
    """Grouped-query attention over pages; the step's own keys are written first."""

    def __init__(self, config: AttentionConfig, size: int, init: Init):
        self.config = config
        declare(self, attention_shapes(config, size), init)

    def __call__(
        self,
        x: Streams,
        pools: Pools,
        index: int,
        step: StepContext,
        adapt: "nnx.Module | None" = None,
    ) -> tuple[Streams, Pools]:
        """Mixes both streams; `index` counts layers with keys and values."""
        batch = step.batch
        keys, values = pools.key_pages, pools.value_pages
        queries: list[Array | None] = []
        places = (step.cell_positions, batch.row_positions[:, None])
        for stream, at, (pages, offsets) in zip(
            x, places, (step.cell_pages, step.row_pages), strict=True
        ):
            if stream is None:
                queries.append(None)
                continue
            q, k, v = self._project(stream, at, adapt)
            queries.append(q)
            keys = keys.at[index, pages, offsets].set(k, mode="drop")
            values = values.at[index, pages, offsets].set(v, mode="drop")
        tables = (batch.cell_tables, batch.row_tables)
        counts = (step.cell_num_keys, step.row_num_keys)
        mixed = []
        for stream, q, table, at, count in zip(
            x, queries, tables, places, counts, strict=True
        ):
            if q is None:
                mixed.append(None)
                continue
            out = paged_attention(
                q,
                keys,
                values,
                table,
                at,
                count,
                layer=index,
                scale=self.config.scale,
            )
            mixed.append(linear(self.out, out.reshape(stream.shape[0], -1)))
        return Streams(*mixed), pools.replace(key_pages=keys, value_pages=values)

    def _project(
        self, x: Array, positions: Array, adapt: "nnx.Module | None"
    ) -> tuple[Array, Array, Array]:
        """Queries, keys and values, [A, Q, heads, D]."""
        attention = self.config
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        joint = linear(self.qkv, x)
        if adapt is not None and hasattr(adapt, "q_down"):
            parts = [
                linear(
                    getattr(adapt, f"{n}_up"), linear(getattr(adapt, f"{n}_down"), x)
                )
                for n in "qkv"
            ]
            joint = joint + jnp.concatenate(parts, axis=-1)
        joint = joint.reshape(*positions.shape, heads + 2 * kv_heads, -1)
        q, k, v = jnp.split(joint, [heads, heads + kv_heads], axis=-2)
        if attention.key_multiplier != 1.0:
            k = k * attention.key_multiplier
        rotary = attention.rotary
        if rotary is not None:
            q, k = (
                rotate(part, positions, rotary.dim, rotary.theta, rotary.scaling_factor)
                for part in (q, k)
            )
        return q, k, v
