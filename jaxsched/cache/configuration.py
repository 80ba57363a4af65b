"""Rules that a cache's configuration has to keep: refused at start, not when running.

Three managers are told apart by what they can do, under the published names:
`mixed` (states apart from attention, no reuse), `cpp` (states in the block pool),
`v2` (states in pools of their own, any point).
Source: the selection and construction code of TensorRT-LLM after PR #16427.
"""

import dataclasses
import warnings
from collections.abc import Sequence

from jaxsched.cache.sizing_memory import active_interval
from jaxsched.cache.sizing_ranks import effective_block_size, transfer_buffer_tokens
from jaxsched.core.config import MAX_COUNT, ChunkingPolicy
from jaxsched.core.host import check_count, check_counts, check_flag

CAPACITY_POLICIES = (
    "max_requests",
    "guaranteed_no_evict",
    "static_batch",
    "max_utilization",
)
_CHOICES = {
    "manager": ("auto", "mixed", "cpp", "v2"),
    "chunking_policy": tuple(str(policy) for policy in ChunkingPolicy),
    "capacity_policy": CAPACITY_POLICIES,
    "transfer_runtime": (None, "auto", "python", "cpp"),
    "transfer_backend": (None, "default", "nixl", "ucx", "mpi", "mooncake"),
    "model_kind": (None, "mamba2", "gated_delta_net", "kimi_delta_attention"),
    "conv_layout": (None, "channels_first", "channels_last"),
}
_FLAGS = (
    "has_recurrent_layers",
    "enable_prefix_caching",
    "disaggregated",
    "encoder_decoder",
    "has_cross_pool",
    "kv_connector",
    "needs_python_transfer",
    "ahead_of_time",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """A cache's configuration as its user writes it; `check_cache_config` checks it.

    Everything that depends on the block size reads `effective_block_size`.
    """

    has_recurrent_layers: bool = True
    block_size: int = 64
    attention_kernel: str | None = None
    max_seq_len: int = 8192
    max_num_seqs: int = 256
    max_context_length: int | None = None
    chunking_policy: str = "force_chunk"
    capacity_policy: str = "guaranteed_no_evict"
    manager: str = "auto"
    enable_prefix_caching: bool = True
    snapshot_interval: int | None = 0
    offsets_from_start: Sequence[int] = ()
    offsets_from_end: Sequence[int] = ()
    disaggregated: bool = False
    transfer_runtime: str | None = None
    transfer_backend: str | None = None
    max_tokens_in_buffer: int | None = None
    needs_python_transfer: bool = False
    ahead_of_time: bool = False
    kv_connector: bool = False
    beam_width: int = 1
    encoder_decoder: bool = False
    has_cross_pool: bool = False
    max_encoder_tokens: int = 0
    tensor_parallel: int = 1
    num_state_heads: int = 0
    conv_channels: int = 0
    state_bytes_per_layer: int = 0
    state_alignment: int = 1
    num_state_slots: int | None = None
    num_layers: int | None = None
    layer_mask: Sequence[bool] | None = None
    kv_heads_per_layer: Sequence[int] | None = None
    model_kind: str | None = None
    conv_layout: str | None = None

    @property
    def effective_block_size(self) -> int:
        """Tokens of a block after the attention kernel has had its say."""
        return effective_block_size(self.block_size, self.attention_kernel)

    @property
    def chunk_unit_size(self) -> int:
        """Tokens on whose multiples chunks are cut."""
        return self.effective_block_size

    @property
    def transfer_buffer_tokens(self) -> int:
        """Tokens of the transfer buffer, in whole blocks where it is not set."""
        return transfer_buffer_tokens(
            self.max_tokens_in_buffer,
            max_seq_len=self.max_seq_len,
            block_size=self.effective_block_size,
        )

    @property
    def transfers(self) -> bool:
        """Whether caches are sent at all: without a backend they are not."""
        return self.disaggregated and self.transfer_backend is not None


def check_cache_config(config: CacheConfig) -> None:
    """Raises ValueError unless the configuration keeps every rule.

    The message names the field, its value, and what to set instead.
    """
    _check_values(config)
    _check_scheduling(config)
    _check_layers(config)
    if config.has_recurrent_layers:
        _check_recurrent(config)


def select_manager(config: CacheConfig) -> str:
    """The manager that a checked configuration gets: `mixed`, `cpp` or `v2`."""
    check_cache_config(config)
    if config.manager != "auto":
        return config.manager
    python = config.transfers and config.transfer_runtime == "python"
    return "mixed" if python and not config.enable_prefix_caching else "cpp"


def without_useless_reuse(config: CacheConfig) -> CacheConfig:
    """The configuration with reuse turned off where no snapshot could ever serve it.

    Warns when it does so: a recurrent model hits only where a state was kept.
    """
    rules = config.offsets_from_start or config.offsets_from_end
    interval = active_interval(config.snapshot_interval, config.max_seq_len)
    useless = config.has_recurrent_layers and config.enable_prefix_caching
    if not useless or rules or interval:
        return config
    warnings.warn(
        "enable_prefix_caching is turned off: no snapshot would ever be kept; set "
        "snapshot_interval (at most max_seq_len) or offsets_from_start or "
        "offsets_from_end",
        stacklevel=2,
    )
    return dataclasses.replace(config, enable_prefix_caching=False)


def interval_from_alias(
    snapshot_interval: int | None, mamba_state_cache_interval: int | None
) -> int:
    """The interval where the deprecated name may have been used instead.

    Raises:
      ValueError: if both are given and disagree.
    """
    if mamba_state_cache_interval is None:
        return snapshot_interval or 0
    warnings.warn(
        "mamba_state_cache_interval is deprecated: set snapshot_interval", stacklevel=2
    )
    if snapshot_interval not in (None, 0, mamba_state_cache_interval):
        raise ValueError(
            f"snapshot_interval={snapshot_interval} and its old name "
            f"mamba_state_cache_interval={mamba_state_cache_interval} disagree: set "
            "snapshot_interval only"
        )
    return mamba_state_cache_interval


def _refuse(holds: bool, message: str) -> None:
    if holds:
        raise ValueError(message)


def _check_values(config: CacheConfig) -> None:
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        names = ", ".join(repr(choice) for choice in choices)
        _refuse(value not in choices, f"{field} must be one of {names}, got {value!r}")
    for field in _FLAGS:
        check_flag(field, getattr(config, field))
    for field in ("block_size", "max_seq_len", "max_num_seqs", "beam_width"):
        check_count(field, getattr(config, field), low=1)
    check_count("tensor_parallel", config.tensor_parallel, low=1)
    check_count("state_alignment", config.state_alignment, low=1)
    for field in ("offsets_from_start", "offsets_from_end"):
        check_counts(field, getattr(config, field))
    if config.snapshot_interval is not None:
        check_count("snapshot_interval", config.snapshot_interval, low=-MAX_COUNT)


def _check_scheduling(config: CacheConfig) -> None:
    longest, unit = config.max_context_length, config.chunk_unit_size
    if longest is not None:
        check_count("max_context_length", longest, low=1)
        _refuse(
            config.chunking_policy == "force_chunk" and longest < unit,
            f"max_context_length={longest} is below the block size {unit}, so "
            f"force_chunk can cut nothing: set max_context_length to at least {unit}",
        )
        _refuse(
            config.max_encoder_tokens > longest,
            f"max_encoder_tokens={config.max_encoder_tokens} is above "
            f"max_context_length={longest}: raise max_context_length",
        )
        _refuse(
            config.chunking_policy == "none" and config.max_seq_len > longest,
            f"max_seq_len={config.max_seq_len} is above max_context_length={longest} "
            "and prompts are not cut: raise max_context_length or set a "
            "chunking_policy",
        )
    _refuse(
        config.encoder_decoder and not config.has_cross_pool,
        "encoder_decoder needs a pool for cross attention: set has_cross_pool",
    )
    backend = config.transfer_backend
    backend = "nixl" if backend == "default" else backend
    _refuse(
        config.needs_python_transfer
        and config.disaggregated
        and (config.transfer_runtime, backend) != ("python", "nixl"),
        "this model's cache is sent by the Python runtime over NIXL only: set "
        "transfer_runtime='python' and transfer_backend='nixl'",
    )
    _refuse(
        config.transfers and config.transfer_runtime == "python" and backend != "nixl",
        f"transfer_runtime='python' needs transfer_backend='nixl', got {backend!r}",
    )


def _check_layers(config: CacheConfig) -> None:
    for field in ("layer_mask", "kv_heads_per_layer"):
        value = getattr(config, field)
        if value is None or config.num_layers is None:
            continue
        _refuse(
            len(value) != config.num_layers,
            f"{field} has {len(value)} entries, the model {config.num_layers} layers: "
            "give one entry a layer",
        )
    for field in ("num_state_heads", "conv_channels"):
        count = check_count(field, getattr(config, field))
        _refuse(
            count % config.tensor_parallel != 0,
            f"{field}={count} cannot be divided by tensor_parallel="
            f"{config.tensor_parallel}: set tensor_parallel to a divisor of {count}",
        )


def _check_recurrent(config: CacheConfig) -> None:
    manager, runtime = config.manager, config.transfer_runtime
    reuse, transfers = config.enable_prefix_caching, config.transfers
    python = runtime == "python"
    _refuse(
        config.ahead_of_time and config.disaggregated,
        "disaggregated serving of a recurrent model cannot be compiled ahead of time: "
        "set ahead_of_time=False or disaggregated=False",
    )
    _refuse(
        manager == "mixed" and reuse,
        "manager='mixed' cannot reuse prefixes: set enable_prefix_caching=False or "
        "manager='v2'",
    )
    _refuse(
        manager == "mixed" and transfers and not python,
        f"manager='mixed' needs transfer_runtime='python', got {runtime!r}",
    )
    _refuse(
        manager == "v2" and (runtime == "cpp" or (transfers and not python)),
        f"manager='v2' needs transfer_runtime='python', got {runtime!r}",
    )
    _refuse(
        manager == "cpp" and transfers and python,
        "manager='cpp' cannot be sent by the Python runtime: set "
        "transfer_runtime='cpp' or manager='v2'",
    )
    _refuse(
        manager == "auto" and transfers and python and reuse,
        "transfer_runtime='python' with enable_prefix_caching needs manager='v2', "
        "got 'auto'",
    )
    offsets = bool(config.offsets_from_start) or bool(config.offsets_from_end)
    _refuse(
        offsets and manager != "v2",
        f"offsets_from_start and offsets_from_end need manager='v2', got {manager!r}",
    )
    _refuse(
        manager == "v2" and config.beam_width > 1,
        f"manager='v2' needs beam_width=1, got {config.beam_width}",
    )
    _refuse(
        manager == "v2" and config.kv_connector,
        "manager='v2' has no kv_connector: set kv_connector=False",
    )
    _refuse(
        manager == "v2" and config.model_kind is not None,
        f"manager='v2' finds the kind of model itself: leave model_kind unset, got "
        f"{config.model_kind!r}",
    )
    _check_states(config)


def _check_states(config: CacheConfig) -> None:
    size, unit = config.state_bytes_per_layer, config.state_alignment
    _refuse(
        size % unit != 0,
        f"state_bytes_per_layer={size} is no multiple of state_alignment={unit}: pad "
        f"the state to {-(-size // unit) * unit} bytes",
    )
    slots = config.num_state_slots
    if slots is None:
        return
    check_count("num_state_slots", slots)
    needed = config.max_num_seqs + 1
    _refuse(
        slots < needed,
        f"num_state_slots={slots} does not hold the live states of max_num_seqs="
        f"{config.max_num_seqs} requests and the padding slot: set it to at least "
        f"{needed} or lower max_num_seqs",
    )
