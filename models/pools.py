"""Bulk storage of a served model: key and value pages, and recurrent states by slot.

Arrays are stacked over the layers of a kind, so that a step donates and updates six
leaves. Slot 0 is never written: it is the zero state that a new request starts from.

Shape letters: A attention layers, M layers with recurrence, S slots, K convolution
width, Q scan chunk.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.models.config import ModelConfig

Array = jax.Array

ZERO_SLOT = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pools:
    """Everything a step reads and writes besides weights. See `conv` for the states."""

    key_pages: Array  # [A, pages, page_size, kv heads, head dim]
    value_pages: Array  # [A, pages, page_size, kv heads, head dim]
    ssm: Array  # f32[M, S, H, P, N]  scan state `num_tail` tokens before the position
    conv: Array  # [M, S, K-1, channels]  raw rows before that
    tail: Array  # [M, S, Q-1 or 0, raw]  raw rows after it, zeros when not in use
    num_tail: Array  # i32[S]  rows of the tail in use

    @property
    def num_slots(self) -> int:
        """S, the zero slot included."""
        return self.num_tail.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages of a layer."""
        return self.key_pages.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key_pages.shape[2]

    @property
    def tail_size(self) -> int:
        """Rows of a tail; 0: tails are not kept."""
        return self.tail.shape[2]

    def replace(self, **fields: Array) -> "Pools":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


def init_pools(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: str = "float32",
    carry_tails: bool = True,
) -> Pools:
    """Allocates zeroed storage.

    Args:
      config: the model.
      num_pages: pages of keys and values.
      page_size: tokens of a page.
      num_slots: recurrent states, the zero slot included.
      dtype: of keys, values and raw rows, as the weights; scan states are float32.
      carry_tails: whether states keep the open chunk's rows, which makes every cut
        exact; without, cuts must fall on multiples of the scan chunk.

    Raises:
      ValueError: if a size is too small.
    """
    for name, size, least in (
        ("num_pages", num_pages, 1),
        ("page_size", page_size, 1),
        ("num_slots", num_slots, 2),
    ):
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    attention, mamba = config.attention, config.mamba
    kv_heads, head_dim = (
        (attention.num_kv_heads, attention.head_dim) if attention else (1, 1)
    )
    num_attention, num_mamba = len(config.attention_layers), len(config.mamba_layers)
    pages = (num_attention, num_pages, page_size, kv_heads, head_dim)
    slots = (num_mamba, num_slots)
    if mamba is None:
        raise ValueError("a model without recurrent layers has no states to pool")
    rows = mamba.chunk_size - 1 if carry_tails else 0
    return Pools(
        key_pages=jnp.zeros(pages, dtype),
        value_pages=jnp.zeros(pages, dtype),
        ssm=jnp.zeros(
            (*slots, mamba.num_heads, mamba.head_dim, mamba.state_size), jnp.float32
        ),
        conv=jnp.zeros((*slots, mamba.conv_width - 1, mamba.conv_channels), dtype),
        tail=jnp.zeros((*slots, rows, mamba.raw_size), dtype),
        num_tail=jnp.zeros((num_slots,), jnp.int32),
    )


def copy_states(pools: Pools, sources: Array, targets: Array) -> Pools:
    """Copies states slot by slot: a snapshot into a running slot, or back.

    Args:
      pools: the storage.
      sources: i32[n] slots to read.
      targets: i32[n] slots to write, each once; past the end: no copy.
    """

    def over_layers(values: Array) -> Array:
        return values.at[:, targets].set(values[:, sources], mode="drop")

    return pools.replace(
        ssm=over_layers(pools.ssm),
        conv=over_layers(pools.conv),
        tail=over_layers(pools.tail),
        num_tail=pools.num_tail.at[targets].set(pools.num_tail[sources], mode="drop"),
    )


def copy_pages(pools: Pools, sources: Array, targets: Array) -> Pools:
    """Copies pages of every attention layer: the open block of a shared prefix.

    Args:
      pools: the storage.
      sources: i32[n] pages to read.
      targets: i32[n] pages to write, each once; past the end: no copy.
    """

    def over_layers(values: Array) -> Array:
        return values.at[:, targets].set(values[:, sources], mode="drop")

    return pools.replace(
        key_pages=over_layers(pools.key_pages),
        value_pages=over_layers(pools.value_pages),
    )
