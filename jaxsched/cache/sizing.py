"""Bytes of a model's cache: per token, per live state, per snapshot; pools from memory.

All sizes are for one rank: tensor parallelism divides heads, pipeline parallelism
layers. Memory figures are bytes; GB is 10**9.
"""

import dataclasses
import re
from collections.abc import Sequence

from jaxsched.cache.sizing_layers import LayerShape
from jaxsched.cache.sizing_shapes import ModelShape
from jaxsched.core.host import check_count

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
}
"""Element types and their bytes. Scales of quantised types are not counted."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
    _UNITS[_letter] = 1000**_power


def parse_bytes(field: str, text: str | int) -> int:
    """Bytes of `141GB`, `80GiB`, `512 MiB`, or a plain number.

    Raises:
      ValueError: naming the field, if it is no positive amount of memory.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError(f"{field} must be like 141GB, 80GiB or bytes, got {text!r}")
    amount = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if amount < 1:
        raise ValueError(f"{field} must be above 0, got {text!r}")
    return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementTypes:
    """Element types of what is stored.

    Raises:
      ValueError: naming the field, on a type that is not in `DTYPE_BYTES`.
    """

    weights: str = "bfloat16"
    kv: str = "bfloat16"
    state: str = "float32"
    conv: str = "bfloat16"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in DTYPE_BYTES:
                names = ", ".join(DTYPE_BYTES)
                raise ValueError(
                    f"{field.name} type must be one of {names}, got {value!r}"
                )

    def bytes_of(self, field: str) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[getattr(self, field)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """Bytes that one rank stores."""

    weights: int
    kv_per_token: int
    state: int  # one live state, or one snapshot: all arrays of all layers

    @property
    def state_in_kv_tokens(self) -> float:
        """How many tokens of keys and values weigh as much as a state; inf if none."""
        return self.state / self.kv_per_token if self.kv_per_token else float("inf")


def cache_bytes(
    shape: ModelShape,
    types: ElementTypes = ElementTypes(),
    *,
    tensor_parallel: int = 1,
    layers: Sequence[LayerShape] | None = None,
) -> CacheBytes:
    """Bytes of one rank.

    Args:
      shape: the model.
      types: element types.
      tensor_parallel: ranks that share every layer. Weights are divided evenly;
        fewer KV heads than ranks are stored by several of them.
      layers: those of this pipeline rank; default all.

    Raises:
      ValueError: if heads or channels of a layer cannot be divided.
    """
    ranks = check_count("tensor_parallel", tensor_parallel, low=1)
    local = shape.layers if layers is None else tuple(layers)
    kv = sum(_kv_elements(layer, ranks) for layer in local)
    state = sum(_divided(layer, "state_elements", ranks) for layer in local)
    conv = sum(_divided(layer, "conv_elements", ranks) for layer in local)
    params = sum(layer.num_params for layer in local) + shape.num_embedding_params
    return CacheBytes(
        weights=-(-params // ranks) * types.bytes_of("weights"),
        kv_per_token=kv * types.bytes_of("kv"),
        state=state * types.bytes_of("state") + conv * types.bytes_of("conv"),
    )


def _kv_elements(layer: LayerShape, ranks: int) -> int:
    heads = layer.num_kv_heads
    if heads == 0 or layer.kv_is_shared:
        return layer.kv_elements
    if heads % ranks and ranks % heads:
        raise ValueError(
            f"tensor_parallel={ranks} must divide the {heads} KV heads of the "
            f"{layer.kind} layers or be a multiple of them"
        )
    return layer.kv_elements // heads * max(heads // ranks, 1)


def _divided(layer: LayerShape, field: str, ranks: int) -> int:
    if not layer.has_state:
        return 0
    for what, count in (
        ("heads", layer.num_state_heads),
        ("convolution channels", layer.conv_channels),
    ):
        if count % ranks:
            raise ValueError(
                f"tensor_parallel={ranks} must divide the {count} {what} of the "
                f"{layer.kind} layers"
            )
    return getattr(layer, field) // ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """What a memory budget holds, on one rank.

    Attributes:
      budget: bytes for the whole cache.
      block_size: tokens of a block.
      num_live_slots: states of running requests.
      num_blocks: blocks of keys and values; 0: the rank stores none.
      num_snapshots: kept states.
      used: bytes of all of them together, at most `budget`.
    """

    budget: int
    block_size: int
    num_live_slots: int
    num_blocks: int
    num_snapshots: int
    used: int

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return self.num_blocks * self.block_size


def pool_sizes(
    sizes: CacheBytes,
    budget: int,
    *,
    block_size: int,
    num_live_slots: int,
    snapshot_interval: int = 0,
    num_snapshots: int | None = None,
    max_tokens: int | None = None,
) -> PoolSizes:
    """Divides a budget into live states, snapshots and blocks.

    Live states come first. The rest is divided so that every token of the blocks has
    its share of periodic snapshots, or as many as `num_snapshots` says.

    Args:
      sizes: bytes of the rank.
      budget: bytes for the cache.
      block_size: tokens, after any override by the attention kernel.
      num_live_slots: requests that run at once, and spare slots.
      snapshot_interval: tokens between periodic snapshots; 0: none.
      num_snapshots: a fixed number instead.
      max_tokens: no more than that many tokens.

    Raises:
      ValueError: naming what is too small and what would be right.
    """
    check_count("block_size", block_size, low=1)
    check_count("num_live_slots", num_live_slots, low=1)
    check_count("snapshot_interval", snapshot_interval)
    live = num_live_slots * sizes.state
    block = block_size * sizes.kv_per_token
    if budget < live + block:
        raise ValueError(
            f"the cache budget of {budget} bytes does not hold {num_live_slots} live "
            f"states ({live} bytes) and one block ({block} bytes): give it at least "
            f"{live + block} bytes or lower max_num_seqs"
        )
    rest, state = budget - live, sizes.state
    if num_snapshots is not None:
        kept = check_count("num_snapshots", num_snapshots)
        if kept * state + block > rest:
            most = max(rest - block, 0) // state
            raise ValueError(
                f"num_snapshots={kept} needs {kept * state} bytes, {rest} are left "
                f"beside the live states and a block is {block}: set it to at most "
                f"{most}"
            )
        blocks = (rest - kept * state) // block if block else 0
    elif snapshot_interval and state:
        each = sizes.kv_per_token * snapshot_interval + state
        tokens = rest * snapshot_interval // each
        blocks = tokens // block_size if block else 0
        kept = (rest - blocks * block) // state
        kept = min(kept, -(-tokens // snapshot_interval))
    else:
        kept, blocks = 0, rest // block if block else 0
    if max_tokens is not None and blocks * block_size > max_tokens:
        blocks = -(-max_tokens // block_size)
        if num_snapshots is None and snapshot_interval:
            kept = min(kept, -(-max_tokens // snapshot_interval))
    return PoolSizes(
        budget=budget,
        block_size=block_size,
        num_live_slots=num_live_slots,
        num_blocks=blocks,
        num_snapshots=kept,
        used=live + blocks * block + kept * state,
    )
