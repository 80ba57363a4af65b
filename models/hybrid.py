"""`HybridModel`: a row of layers over two token streams, and the step it takes."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsched.core.masking import iota
from jaxsched.models.batch import Batch
from jaxsched.models.config import Layer, ModelConfig
from jaxsched.models.conv import Cut
from jaxsched.models.feed_forward import Mlp, Moe
from jaxsched.models.mixers import Attention, MambaMixer, StepContext
from jaxsched.models.modules import Init, Streams, declare, linear, scoped
from jaxsched.models.moe import MoeForm
from jaxsched.models.paged_attention import page_slots
from jaxsched.models.parameters import adapter_shapes
from jaxsched.models.pools import Pools
from jaxsched.models.primitives import matmul, rms_norm

Array = jax.Array


class SharedBlock(nnx.Module):
    """A transformer block that several layers use, each with its own adapters."""

    def __init__(self, config: ModelConfig, init: Init):
        self.eps = config.norm_eps
        size, attention = config.hidden_size, config.attention
        shapes = {"norm.weight": (attention.in_size,), "ffn_norm.weight": (size,)}
        declare(self, shapes, init)
        self.attention = Attention(attention, size, scoped(init, "attention"))
        self.mlp = Mlp(config.mlp, size, scoped(init, "mlp"))

    def __call__(
        self,
        x: Streams,
        pools: Pools,
        index: int,
        step: StepContext,
        adapters: nnx.Module,
    ) -> tuple[Streams, Pools]:
        """[T, 2D] -> [T, D]; no residual inside."""
        x = x.map(lambda part: rms_norm(part, self.norm.weight[...], self.eps))
        x, pools = self.attention(x, pools, index, step, adapters)
        x = x.map(lambda part: rms_norm(part, self.ffn_norm.weight[...], self.eps))
        return x.map(lambda part: self.mlp(part, adapters)), pools


class HybridLayer(nnx.Module):
    """One layer of the pattern."""

    def __init__(self, config: ModelConfig, layer: Layer, form: MoeForm, init: Init):
        self.config, self.layer = config, layer
        size = config.hidden_size
        declare(self, {"norm.weight": (size,)}, init)
        if layer.mixer == "shared":
            declare(self, {"linear.weight": (size, size)}, init)
            self.adapters = nnx.Module()
            declare(self.adapters, adapter_shapes(config), scoped(init, "adapters"))
        if layer.has_mamba:
            self.mamba = MambaMixer(config.mamba, size, scoped(init, "mamba"))
        if layer.mixer in ("attention", "parallel"):
            self.attention = Attention(
                config.attention, size, scoped(init, "attention")
            )
        if layer.mixer != "none" and layer.feed_forward != "none":
            declare(self, {"ffn_norm.weight": (size,)}, init)
        if layer.feed_forward == "mlp":
            self.mlp = Mlp(config.mlp, size, scoped(init, "mlp"))
        if layer.feed_forward == "moe":
            self.moe = Moe(config.moe, size, form, scoped(init, "moe"))

    def mix(
        self, x: Streams, pools: Pools, indices: tuple[int, int], step: StepContext
    ) -> tuple[Streams, Pools]:
        """The mixer, or both of them added, on normed input."""
        mamba_index, attention_index = indices
        total = None
        if self.layer.has_mamba:
            out, pools = self.mamba(x, pools, mamba_index, step)
            total = _scaled(out, self.config.mamba.out_multiplier)
        if self.layer.mixer in ("attention", "parallel"):
            attention = self.config.attention
            out, pools = self.attention(
                _scaled(x, attention.in_multiplier), pools, attention_index, step
            )
            out = _scaled(out, attention.out_multiplier)
            total = out if total is None else total.add(out)
        return total, pools

    def feed(self, x: Streams) -> Streams:
        """The feed-forward, on normed input."""
        return x.map(self.mlp if self.layer.feed_forward == "mlp" else self.moe)


class HybridModel(nnx.Module):
    """A hybrid model: parameters, and a pure step over pools and a batch.

    Parameters are named as in `parameters.parameter_shapes`. Nothing but parameters is
    a variable; pools go in and come out.
    """

    def __init__(self, config: ModelConfig, init: Init, form: MoeForm = MoeForm.DENSE):
        self.config = config
        size, vocabulary = config.hidden_size, config.vocab_size
        declare(self, {"embed.weight": (vocabulary, size)}, init)
        if config.shared is not None:
            self.shared = nnx.List(
                SharedBlock(config, scoped(init, f"shared.{index}"))
                for index in range(config.shared.num_blocks)
            )
        self.layers = nnx.List(
            HybridLayer(config, layer, form, scoped(init, f"layers.{index}"))
            for index, layer in enumerate(config.layers)
        )
        declare(self, {"final_norm.weight": (size,)}, init)
        if not config.tie_embeddings:
            declare(self, {"lm_head.weight": (vocabulary, size)}, init)

    def __call__(self, pools: Pools, batch: Batch) -> tuple[Pools, Array]:
        """One step.

        Returns:
          The pools after it, and f32[U + R, V] logits: first of `logit_columns`, then
          of every row.
        """
        config = self.config
        step = step_context(pools, batch)
        tokens = (batch.cell_tokens.reshape(-1), batch.row_tokens)
        embedded = Streams(
            *(self._embed(part) if part.shape[0] else None for part in tokens)
        )
        hidden = embedded
        mamba_index = attention_index = 0
        for layer in self.layers:
            indices = (mamba_index, attention_index)
            hidden, pools = self._run(layer, hidden, embedded, pools, indices, step)
            mamba_index += layer.layer.has_mamba
            attention_index += layer.layer.has_attention
        pools = pools.replace(num_tail=_tail_sizes(pools, step))
        # Gathered first: the norm and the head then run on the rows that are read.
        if hidden.cells is not None:
            hidden = hidden._replace(cells=hidden.cells[batch.logit_columns])
        weight = self.final_norm.weight[...]
        hidden = hidden.map(lambda part: rms_norm(part, weight, config.norm_eps))
        logits = [part for part in hidden.map(self._head) if part is not None]
        return pools, jnp.concatenate(logits)

    def _embed(self, token_ids: Array) -> Array:
        found = self.embed.weight[...][token_ids]
        multiplier = self.config.embedding_multiplier
        return found * multiplier if multiplier != 1.0 else found

    def _head(self, x: Array) -> Array:
        head = self.embed if self.config.tie_embeddings else self.lm_head
        logits = matmul(x, head.weight[...]).astype(jnp.float32)
        multiplier = self.config.logits_multiplier
        return logits * multiplier if multiplier != 1.0 else logits

    def _run(
        self,
        layer: HybridLayer,
        hidden: Streams,
        embedded: Streams,
        pools: Pools,
        indices: tuple[int, int],
        step: StepContext,
    ) -> tuple[Streams, Pools]:
        kind, eps = layer.layer, self.config.norm_eps
        inner = hidden
        if kind.mixer == "shared":
            both = hidden.map(_side_by_side, embedded)
            out, pools = self.shared[kind.shared_block](
                both, pools, indices[1], step, layer.adapters
            )
            inner = hidden.add(out.map(lambda part: linear(layer.linear, part)))
        x = inner.map(lambda part: rms_norm(part, layer.norm.weight[...], eps))
        if kind.mixer != "none":
            branch, pools = layer.mix(x, pools, indices, step)
            hidden = self._add(hidden, branch)
        if kind.feed_forward == "none":
            return hidden, pools
        if kind.mixer != "none":
            weight = layer.ffn_norm.weight[...]
            x = hidden.map(lambda part: rms_norm(part, weight, eps))
        return self._add(hidden, layer.feed(x)), pools

    def _add(self, hidden: Streams, branch: Streams) -> Streams:
        branch = _scaled(branch, self.config.residual_multiplier)
        if self.config.residual_in_float32:
            hidden = hidden.map(lambda part: part.astype(jnp.float32))
            branch = branch.map(lambda part: part.astype(jnp.float32))
        return hidden.add(branch)


def _side_by_side(first: Array, second: Array) -> Array:
    return jnp.concatenate([first, second], axis=-1)


def _scaled(x: Streams, multiplier: float) -> Streams:
    return x.map(lambda part: part * multiplier) if multiplier != 1.0 else x


def step_context(pools: Pools, batch: Batch) -> StepContext:
    """Positions, key slots and cuts of a batch, which all layers share."""
    columns = iota(batch.cell_tokens.shape[1])[None]
    positions = batch.cell_start[:, None] + columns
    fresh = (columns >= batch.cell_first_fresh[:, None]) & (
        columns < batch.cell_fill[:, None]
    )
    tails = jnp.where(batch.cell_is_first, pools.num_tail[batch.cell_load_slot], 0)
    sizes = (pools.page_size, pools.num_pages)
    return StepContext(
        batch=batch,
        cut=Cut(
            is_first=batch.cell_is_first,
            lead=batch.cell_first_fresh - tails,
            first_fresh=batch.cell_first_fresh,
            fill=batch.cell_fill,
        ),
        cell_positions=positions,
        cell_pages=page_slots(batch.cell_tables, positions, fresh, *sizes),
        cell_num_keys=jnp.where(
            batch.cell_fill > 0, batch.cell_start + batch.cell_fill, 0
        ),
        row_pages=page_slots(
            batch.row_tables,
            batch.row_positions[:, None],
            batch.row_mask[:, None],
            *sizes,
        ),
        row_num_keys=jnp.where(batch.row_mask, batch.row_positions + 1, 0),
    )


def _tail_sizes(pools: Pools, step: StepContext) -> Array:
    batch, found = step.batch, pools.num_tail
    if batch.write_cell.shape[0]:
        sizes = batch.write_count - step.cut.lead[batch.write_cell]
        sizes = jnp.where(batch.write_plain, 0, sizes)
        found = found.at[batch.write_slot].set(sizes, mode="drop")
    return found.at[batch.row_store_slot].set(0, mode="drop")
