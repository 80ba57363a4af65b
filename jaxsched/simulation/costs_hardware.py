"""Accelerators: peaks from data sheets, and what share of them kernels reach.

Rates are per device. TFLOPS and TB/s are 10**12, GB 10**9; times are microseconds.
"""

import dataclasses
import json
import math
import numbers
from pathlib import Path


def _check(name: str, value: object, high: float, above_zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    low_is_fine = value > 0 if above_zero else value >= 0
    if not math.isfinite(value) or not low_is_fine or value > high:
        interval = f"(0, {high:g}]" if above_zero else f"[0, {high:g}]"
        raise ValueError(f"{name} must be in {interval}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What kernels reach of a device's peaks, and what they cost besides.

    `..._compute` and `..._bandwidth` are shares of the peak in (0, 1]; `..._us` is
    what one kernel takes when it has next to nothing to do. The defaults of `gemm`,
    `attention`, `scan` and `elementwise` are fits to kernel times measured on one
    H200 by the authors of aiconfigurator-core 0.12.0 (Apache-2.0), rounded;
    `benchmarks/costs.py` makes them anew and prints their errors. The others are
    assumptions, each said so.

    Attributes:
      gemm_compute, gemm_bandwidth, gemm_us: dense matrix products, LM head.
      experts_compute, experts_bandwidth, experts_us: grouped products of experts;
        assumed: like dense ones, at four fifths of the compute.
      attention_compute, attention_bandwidth, attention_us: scores and values.
      attention_stream_bandwidth: tokens in and out of the prefill's kernel, on top.
      attention_row_tokens: tokens of context that a decode row costs besides its own.
      scan_compute, scan_bandwidth, scan_us: recurrences; fitted to gated delta nets,
        for Mamba-2 assumed alike.
      scan_serial_us: a token of a prefill's scan takes at least that long, however
        few heads there are: the chunks of a sequence follow each other.
      update_bandwidth, update_us: a decode's update of the states, which does less
        than one FLOP for a byte.
      elementwise_bandwidth, elementwise_us: norms, activations, short convolutions.
      collective_bandwidth, collective_us: all-reduce over the links; assumed.
      copy_bandwidth, copy_us: snapshots written or restored, one kernel each;
        the bandwidth assumed like that of elementwise kernels.
      chunk_us: host work for one more prefill chunk in a step; assumed none.
      row_us: host work for one decode row of a step; assumed none.
      step_us: host work of any step; assumed.
    """

    gemm_compute: float = 0.80
    gemm_bandwidth: float = 0.83
    gemm_us: float = 4.3
    experts_compute: float = 0.64
    experts_bandwidth: float = 0.83
    experts_us: float = 6.0
    attention_compute: float = 0.69
    attention_stream_bandwidth: float = 0.33
    attention_bandwidth: float = 0.88
    attention_us: float = 12.0
    attention_row_tokens: float = 190.0
    scan_compute: float = 0.30
    scan_bandwidth: float = 0.8
    scan_us: float = 9.7
    scan_serial_us: float = 0.047
    update_bandwidth: float = 0.9
    update_us: float = 3.7
    elementwise_bandwidth: float = 0.50
    elementwise_us: float = 2.9
    collective_bandwidth: float = 0.7
    collective_us: float = 8.0
    copy_bandwidth: float = 0.7
    copy_us: float = 2.5
    chunk_us: float = 0.0
    row_us: float = 0.0
    step_us: float = 1000.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            share = field.name.endswith(("_compute", "_bandwidth"))
            _check(field.name, getattr(self, field.name), 1.0 if share else 1e7, share)

    def scaled(self, *, compute: float = 1.0, bandwidth: float = 1.0) -> "Efficiency":
        """All shares of compute and of memory bandwidth times a factor, at most 1."""
        factors = {"_compute": compute, "_bandwidth": bandwidth}
        changed = {}
        for field in dataclasses.fields(self):
            for ending, factor in factors.items():
                if field.name.endswith(ending):
                    changed[field.name] = min(getattr(self, field.name) * factor, 1.0)
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """An accelerator.

    Attributes:
      name: for people.
      tflops_16bit: dense bf16 or fp16 peak.
      tflops_8bit: dense 8-bit peak; where there is none, that of 16 bits.
      memory_tb_s: memory bandwidth.
      memory_gb: memory.
      link_gb_s: bandwidth to the other devices of a server, in one direction.
      source: where the peaks are from.
      efficiency: what kernels reach of them.

    Raises:
      ValueError: naming the field, the value and what would be right.
    """

    name: str
    tflops_16bit: float
    tflops_8bit: float
    memory_tb_s: float
    memory_gb: float
    link_gb_s: float
    source: str = "custom"
    efficiency: Efficiency = Efficiency()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type is float or field.type == "float":
                _check(field.name, getattr(self, field.name), 1e9, True)

    def replace(self, **fields) -> "Hardware":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


HARDWARE = {
    "H200": Hardware(
        name="H200",
        tflops_16bit=989.0,
        tflops_8bit=1979.0,
        memory_tb_s=4.8,
        memory_gb=141.0,
        link_gb_s=450.0,
        source="NVIDIA H200 data sheet (SXM, without sparsity); NVLink 900 GB/s both "
        "ways",
    ),
    "H100": Hardware(
        name="H100",
        tflops_16bit=989.0,
        tflops_8bit=1979.0,
        memory_tb_s=3.35,
        memory_gb=80.0,
        link_gb_s=450.0,
        source="NVIDIA H100 data sheet (SXM, without sparsity); NVLink 900 GB/s both "
        "ways",
    ),
    "A100": Hardware(
        name="A100",
        tflops_16bit=312.0,
        tflops_8bit=312.0,
        memory_tb_s=2.039,
        memory_gb=80.0,
        link_gb_s=300.0,
        source="NVIDIA A100 data sheet (SXM 80 GB, without sparsity; it has no 8-bit "
        "floats); NVLink 600 GB/s both ways",
    ),
    "B200": Hardware(
        name="B200",
        tflops_16bit=2250.0,
        tflops_8bit=4500.0,
        memory_tb_s=8.0,
        memory_gb=180.0,
        link_gb_s=900.0,
        source="NVIDIA DGX B200 data sheet (an eighth of the server, without "
        "sparsity); NVLink 1,800 GB/s both ways",
    ),
}
"""Presets by name."""


def find_hardware(name: str) -> Hardware:
    """A preset by its name, whatever its case, or the hardware of a JSON file.

    A file is an object with the fields of `Hardware`; its `efficiency`, an object with
    fields of `Efficiency`, may leave out what stays as it is.

    Raises:
      ValueError: if there is no such preset or file, or the file is not right.
    """
    for known, hardware in HARDWARE.items():
        if known.lower() == str(name).lower():
            return hardware
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"hardware must be one of {', '.join(HARDWARE)} or a JSON file, "
            f"got {name!r}"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("a hardware must be a JSON object")
        _check_names("hardware", fields, Hardware)
        rates = fields.get("efficiency", {})
        if not isinstance(rates, dict):
            raise ValueError(f"efficiency must be a JSON object, got {rates!r}")
        _check_names("efficiency", rates, Efficiency)
        fields = {"name": path.stem} | fields | {"efficiency": Efficiency(**rates)}
        for field in dataclasses.fields(Hardware):
            if field.default is dataclasses.MISSING and field.name not in fields:
                raise ValueError(f"{field.name} is missing")
        return Hardware(**fields)
    except (OSError, ValueError) as wrong:
        raise ValueError(f"{path}: {wrong}") from wrong


def _check_names(what: str, given: dict, kind: type) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(f"{what} has no field {name!r}; known: {', '.join(known)}")
