"""The measured points that costs are calibrated on: kernels, and whole servers."""

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np

from jaxsched.cache.sizing import ElementTypes
from jaxsched.simulation.costs_models import ModelDescription, describe_model
from jaxsched.simulation.costs_tables import US_PER_MS, read_rows

_PEAK_FLOPS, _PEAK_BYTES = 989e12, 4.8e12
_B = 2  # bytes of a bf16 element
_SCAN_CHUNK = 64

MODELS = {
    "Llama-3.1-8B": {
        "order": "*-" * 32,
        "hidden": 4096,
        "heads": (32, 8, 128),
        "mlp": (14336, True),
        "vocab": 128256,
    },
    "Qwen3-32B": {
        "order": "*-" * 64,
        "hidden": 5120,
        "heads": (64, 8, 128),
        "mlp": (25600, True),
        "vocab": 151936,
    },
    "Qwen3.5-397B-A17B": {
        "order": "GEGEGE*E" * 15,
        "hidden": 4096,
        "heads": (32, 2, 256),
        "output_gate": True,
        "moe": (512, 1024, 1024, True, 0),
        "experts_per_token": 10,
        "gated_delta_net": (16, 64, 128, 128, 4),
        "vocab": 248320,
    },
}
"""Models of the measured servers, by the public configurations as remembered; their
parameters add up to the sizes in the names (8.0, 32.8 and 396 billion)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KernelPoints:
    """Measured times of one kernel, and what it does in them; f64[points] each."""

    coefficients: tuple[str, ...]
    keys: list  # the shape of each point: equal shapes stay in one half
    flops: np.ndarray
    bytes_moved: np.ndarray
    time_us: np.ndarray
    stream_bytes: np.ndarray  # moved while nothing else is done
    row_bytes: np.ndarray  # of a token of context, times the rows
    serial_tokens: np.ndarray  # of the longest sequence
    peak_flops: float = _PEAK_FLOPS
    peak_bytes: float = _PEAK_BYTES


_FILES = {
    "gemm": "h200_vllm0.24_gemm_bf16.csv.gz",
    "context": "h200_vllm0.24_context_attention_bf16.csv.gz",
    "generation": "h200_vllm0.24_generation_attention_bf16.csv.gz",
    "delta": "h200_vllm0.24_gdn.csv.gz",
}
_ROOF = ("compute", "bandwidth", "floor_us")
KERNELS = {
    "matrix product, both widths >= 1,024": ("gemm", _ROOF),
    "attention, prefill, >= 512 tokens, >= 8 heads": (
        "context",
        ("compute", "floor_us", "stream_bandwidth"),
    ),
    "attention, decode": ("generation", ("bandwidth", "floor_us", "row_tokens")),
    "gated delta net, prefill, >= 64 tokens": (
        "chunk_gated_delta_rule_flashinfer",
        (*_ROOF, "serial_us"),
    ),
    "gated delta net, decode": (
        "fused_recurrent_gated_delta_rule_packed_decode",
        ("bandwidth", "floor_us"),
    ),
    "short convolution, prefill": ("causal_conv1d_fn", ("bandwidth", "floor_us")),
}
"""Which file or kernel the points are of, and what is fitted."""


def kernel_points(folder: Path, name: str) -> KernelPoints:
    """The points of one of `KERNELS`."""
    what, coefficients = KERNELS[name]
    rows = read_rows(folder / _FILES.get(what, _FILES["delta"]))
    make = {"gemm": _gemm, "context": _context, "generation": _generation}
    keys, fields = make.get(what, lambda rows: _delta(rows, what))(rows)
    nothing = np.zeros_like(fields["time_us"])
    names = ("flops", "bytes_moved", "stream_bytes", "row_bytes", "serial_tokens")
    fields = dict.fromkeys(names, nothing) | fields
    return KernelPoints(coefficients=coefficients, keys=keys, **fields)


def _columns(rows: list[dict], *names: str) -> list[np.ndarray]:
    return [np.array([float(row[name]) for row in rows]) for name in names]


def _gemm(rows: list[dict]):
    rows = [row for row in rows if min(int(row["n"]), int(row["k"])) >= 1024]
    m, n, k, ms = _columns(rows, "m", "n", "k", "latency")
    return list(zip(n, k, strict=True)), {
        "flops": 2 * m * n * k,
        "bytes_moved": _B * (m * k + k * n + m * n),
        "time_us": ms * US_PER_MS,
    }


def _context(rows: list[dict]):
    rows = [
        row for row in rows if int(row["isl"]) >= 512 and int(row["num_heads"]) >= 8
    ]
    heads = ("num_heads", "num_key_value_heads", "head_dim")
    batch, tokens, q, kv, dim, ms = _columns(
        rows, "batch_size", "isl", *heads, "latency"
    )
    pairs = batch * tokens * (tokens + 1) / 2
    return list(zip(q, kv, dim, strict=True)), {
        "flops": 4 * q * dim * pairs,
        "stream_bytes": batch * tokens * (2 * q + 2 * kv) * dim * _B,
        "time_us": ms * US_PER_MS,
    }


def _generation(rows: list[dict]):
    heads = ("num_heads", "num_key_value_heads", "head_dim")
    batch, step, q, kv, dim, ms = _columns(
        rows, "batch_size", "step", *heads, "latency"
    )
    token = 2 * kv * dim * _B
    return list(zip(q, kv, dim, strict=True)), {
        "bytes_moved": token * batch * (step + 1),
        "row_bytes": token * batch,
        "time_us": ms * US_PER_MS,
    }


def _delta(rows: list[dict], kernel: str):
    scan = kernel.startswith("chunk")
    rows = [row for row in rows if row["kernel_source"] == kernel]
    if scan:
        rows = [row for row in rows if int(row["seq_len"]) >= _SCAN_CHUNK]
    batch, length, k_heads, key, v_heads, value, ms = _columns(
        rows,
        *("batch_size", "seq_len", "num_k_heads", "head_k_dim"),
        *("num_v_heads", "head_v_dim", "latency"),
    )
    tokens, state = batch * length, v_heads * key * value
    channels = 2 * k_heads * key + v_heads * value
    fields = {"time_us": ms * US_PER_MS}
    if scan:
        products = 2 * _SCAN_CHUNK * (2 * key + value) + 6 * key * value
        fields["flops"] = tokens * v_heads * products
        widths = channels + v_heads * value + 2 * v_heads
        fields["bytes_moved"] = tokens * (_B * widths + 8 * state / _SCAN_CHUNK)
        fields["serial_tokens"] = length
    elif kernel.startswith("fused"):
        fields["bytes_moved"] = tokens * (8 * state + _B * (channels + v_heads * value))
    else:
        fields["bytes_moved"] = 2 * _B * channels * tokens
    return list(zip(k_heads, v_heads, strict=True)), fields


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """Measured servers of one kind; f64[points] each, times in microseconds."""

    system: str
    engine: str
    model: ModelDescription
    types: ElementTypes
    precision: str
    keys: list
    ranks: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    concurrency: np.ndarray
    ttft_us: np.ndarray
    tpot_us: np.ndarray

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.system} {self.engine} {self.model.name} {self.precision}"


def serving_points(folder: Path) -> list[Setup]:
    """Servers by system, engine, model and precision.

    Rows that repeat a measurement are taken once. Left out: 4-bit weights, for which
    no element type is known, and rows that do not say how many devices there are.
    """
    groups: dict[tuple, dict[tuple, tuple]] = defaultdict(dict)
    for row in read_rows(folder / "aic_silicon_sample_agg_subset.csv.gz"):
        model = next(
            name
            for name in MODELS
            if name.lower() in row["model_path"].lower().replace("instruct", "")
        )
        precision = row["precision"] or "bf16"
        if precision == "fp4" or float(row["pp_size"] or 1) != 1:
            continue
        load = tuple(float(row[name]) for name in ("isl", "osl", "batch_size"))
        times = (float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]))
        ranks = float(row["tp_size"])
        if ranks > 16:  # expert ranks times tensor ranks of the same eight devices
            continue
        group = groups[row["system"], row["backend"], model, precision]
        # Copies differ in the digits kept.
        key = (*load, *(float(f"{time:.3g}") for time in times))
        group.setdefault(key, (ranks, *load, *times))
    return [_setup(*names, group) for names, group in groups.items()]


def _setup(system: str, engine: str, model: str, precision: str, group: dict) -> Setup:
    ranks, prompt, output, users, ttft, tpot = np.array(list(group.values())).T
    return Setup(
        system=system.split("_")[0].upper(),
        engine=engine,
        model=describe_model({"name": model, **MODELS[model]}),
        types=ElementTypes(weights="float8" if precision == "fp8" else "bfloat16"),
        precision=precision,
        # Two measurements of the same load are no test of each other either.
        keys=list(zip(ranks, prompt, output, users, strict=True)),
        ranks=ranks,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=users,
        ttft_us=ttft * US_PER_MS,
        tpot_us=tpot * US_PER_MS,
    )
