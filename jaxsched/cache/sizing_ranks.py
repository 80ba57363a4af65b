"""What a rank tells others of its cache, and what a transfer between ranks may hold.

Source: the disaggregation code of TensorRT-LLM after PR #16427.
"""

import dataclasses
from collections.abc import Sequence

from jaxsched.core.host import check_count, check_counts

_BLOCK_SIZES = {"flashmla": 64}
"""Attention kernels that know one block size only."""


def effective_block_size(block_size: int, attention_kernel: str | None = None) -> int:
    """The block size that *every* consumer has to read: FlashMLA forces 64."""
    check_count("block_size", block_size, low=1)
    return _BLOCK_SIZES.get((attention_kernel or "").lower(), block_size)


def transfer_buffer_tokens(
    max_tokens_in_buffer: int | None,
    *,
    max_seq_len: int,
    block_size: int,
    attention_kernel: str | None = None,
) -> int:
    """Tokens of the transfer buffer: as set, or the longest sequence in whole blocks.

    The rounding uses the effective block size, so it is known only after the kernel.
    """
    if max_tokens_in_buffer is not None:
        return check_count("max_tokens_in_buffer", max_tokens_in_buffer)
    size = effective_block_size(block_size, attention_kernel)
    return -(-max_seq_len // size) * size


def transfer_block_budget(
    max_tokens_in_buffer: int | None, block_size: int
) -> int | None:
    """Blocks that transfers under way may hold; None: no limit."""
    if not max_tokens_in_buffer:
        return None
    return -(-max_tokens_in_buffer // block_size)


def admit_transfers(
    num_prompt_tokens: Sequence[int],
    block_size: int,
    budget: int | None,
    num_active_blocks: int = 0,
) -> int:
    """How many transfers of a queue may start, in order.

    One that is larger than the whole budget starts alone, when nothing is under way:
    otherwise it would wait for ever.
    """
    used, started = num_active_blocks, 0
    for tokens in num_prompt_tokens:
        cost = -(-tokens // block_size)
        if budget is not None and used + cost > budget and used > 0:
            break
        used += cost
        started += 1
    return started


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What a rank publishes of its attention cache."""

    num_kv_heads: int  # per rank
    num_attention_layers: int
    tensor_parallel: int  # within a data-parallel group
    dp_size: int
    dp_rank: int
    block_size: int


def rank_info(
    kv_heads_per_layer: Sequence[int],
    *,
    block_size: int,
    tensor_parallel: int = 1,
    tensor_rank: int = 0,
    attention_data_parallel: bool = False,
    attention_kernel: str | None = None,
) -> RankInfo:
    """Rank info for a transfer.

    Recurrent layers have 0 KV heads, and the first layer may be one of them: the head
    count is that of the first layer that has any.

    Args:
      kv_heads_per_layer: heads that this rank stores, layer by layer.
      block_size: as configured.
      tensor_parallel: ranks of the tensor-parallel group.
      tensor_rank: this rank in it.
      attention_data_parallel: whether every rank runs attention on requests of its own.
      attention_kernel: may force another block size.
    """
    heads = check_counts("kv_heads_per_layer", kv_heads_per_layer)
    groups = tensor_parallel if attention_data_parallel else 1
    return RankInfo(
        num_kv_heads=next((count for count in heads if count > 0), 0),
        num_attention_layers=sum(count > 0 for count in heads),
        tensor_parallel=tensor_parallel // groups,
        dp_size=groups,
        dp_rank=tensor_rank if attention_data_parallel else 0,
        block_size=effective_block_size(block_size, attention_kernel),
    )
