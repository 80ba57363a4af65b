"""What a step takes: a roofline for every class of operators.

A kernel takes `..._us + max(FLOPs / (peak * compute), bytes / (bandwidth * share))`.
The maximum is taken for each kernel, never for a whole step: a step mixes kernels that
are limited by arithmetic with others that wait for memory. Where a measured table is
given for a kernel, its interpolated time is used instead.

Everything is a pure function of arrays; with `xp=jax.numpy` it runs inside `jit`.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import ModuleType

import jax
import numpy as np

from jaxsched.cache.sizing import ElementTypes
from jaxsched.core.host import check_count
from jaxsched.simulation.costs_hardware import Efficiency, Hardware
from jaxsched.simulation.costs_models import ModelDescription
from jaxsched.simulation.costs_operators import (
    COEFFICIENTS,
    CostClass,
    Operator,
    model_operators,
)
from jaxsched.simulation.costs_tables import MeasuredTable, table_time

Array = jax.Array | np.ndarray | float

_TERA = 1e12
_GIGA = 1e9
_US = 1e6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepLoad:
    """What one step has to do; arrays of floats of one shape, or plain numbers.

    Leave out what there is none of. `pairs_of_chunk` gives the pairs of a chunk.
    """

    prefill_tokens: Array = 0.0
    decode_rows: Array = 0.0
    context_tokens: Array = 0.0  # of all decode rows together
    token_pairs: Array = 0.0  # of prefill tokens with themselves and what they follow
    num_chunks: Array = 0.0  # prefill chunks
    snapshots_written: Array = 0.0
    snapshots_restored: Array = 0.0


def pairs_of_chunk(start: Array, tokens: Array) -> Array:
    """Pairs of query and key of a causal chunk of `tokens` after `start` tokens."""
    return start * tokens + tokens * (tokens + 1) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A model on a hardware, ready to cost steps; build it with `step_costs`.

    Attributes:
      model: what runs.
      hardware: one device.
      types: element types.
      tensor_parallel: devices that share every layer.
      operators: kernels of one rank.
      tables: measured times by class, or by the shape of a matrix product.
    """

    model: ModelDescription
    hardware: Hardware
    types: ElementTypes
    tensor_parallel: int
    operators: tuple[Operator, ...]
    tables: Mapping[object, MeasuredTable]

    def with_efficiency(self, efficiency: Efficiency) -> "StepCosts":
        """The same with other coefficients."""
        hardware = self.hardware.replace(efficiency=efficiency)
        return dataclasses.replace(self, hardware=hardware)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a matrix product on one device."""
        eight = self.types.bytes_of("weights") == 1
        hardware = self.hardware
        return _TERA * (hardware.tflops_8bit if eight else hardware.tflops_16bit)


def step_costs(
    model: ModelDescription,
    hardware: Hardware,
    types: ElementTypes = ElementTypes(),
    *,
    tensor_parallel: int = 1,
    tables: Mapping[object, MeasuredTable] | None = None,
) -> StepCosts:
    """Costs of a model's steps.

    Args:
      model: see `describe_model`.
      hardware: one device; see `find_hardware`.
      types: element types of weights, keys and values, states.
      tensor_parallel: devices that share every layer.
      tables: measured microseconds of a kernel by its load. A key is a `CostClass`,
        or for matrix products the (inputs, outputs) of one rank; see `costs_tables`.

    Raises:
      ValueError: if the devices cannot divide the model.
    """
    return StepCosts(
        model=model,
        hardware=hardware,
        types=types,
        tensor_parallel=check_count("tensor_parallel", tensor_parallel, low=1),
        operators=model_operators(model, types, tensor_parallel=tensor_parallel),
        tables=dict(tables or {}),
    )


def step_times_us(
    costs: StepCosts, load: StepLoad, xp: ModuleType = np
) -> dict[CostClass, Array]:
    """Microseconds of a step by class of operators; arrays of the load's shape.

    Args:
      costs: the model on its hardware.
      load: the step, or an array of steps.
      xp: `numpy`, or `jax.numpy` inside `jit`.
    """
    loads = {
        field.name: getattr(load, field.name) for field in dataclasses.fields(load)
    }
    loads["tokens"] = load.prefill_tokens + load.decode_rows
    # A chunk's last token may give the first of the answer: one row each.
    loads["sampled_rows"] = load.decode_rows + load.num_chunks
    times: dict[CostClass, Array] = {}
    for operator in costs.operators:
        spent = _operator_us(costs, operator, loads, xp)
        times[operator.kind] = times.get(operator.kind, 0.0) + spent
    rates = costs.hardware.efficiency
    any_work = loads["tokens"] > 0
    times[CostClass.OVERHEAD] = xp.where(any_work, rates.step_us, 0.0) + (
        rates.chunk_us * load.num_chunks + rates.row_us * load.decode_rows
    )
    return times


def step_us(costs: StepCosts, load: StepLoad, xp: ModuleType = np) -> Array:
    """Microseconds of a step, all classes together; see `step_times_us`."""
    return sum(step_times_us(costs, load, xp).values())


def _operator_us(
    costs: StepCosts, operator: Operator, loads: Mapping[str, Array], xp: ModuleType
) -> Array:
    units = loads[operator.when]
    table = costs.tables.get(operator.shape) or costs.tables.get(operator.kind)
    if table is not None:
        spent = table_time(table, units, xp)
    else:
        spent = _roofline_us(costs, operator, loads, xp)
    return operator.count * xp.where(units > 0, spent, 0.0)


def _roofline_us(
    costs: StepCosts, operator: Operator, loads: Mapping[str, Array], xp: ModuleType
) -> Array:
    hardware, rates = costs.hardware, costs.hardware.efficiency
    name, units = COEFFICIENTS[operator.kind], loads[operator.when]
    floor = getattr(rates, f"{name}_us")
    bandwidth = getattr(rates, f"{name}_bandwidth") * (
        hardware.link_gb_s * _GIGA
        if operator.kind == CostClass.COLLECTIVE
        else hardware.memory_tb_s * _TERA
    )
    read = operator.bytes_per_unit * units + _read_once(operator, units, xp)
    if operator.kind == CostClass.ATTENTION_DECODE:
        more = rates.attention_row_tokens * loads["decode_rows"]
        read = read + operator.bytes_per_unit * more
    compute = getattr(rates, f"{name}_compute", 0.0)
    if not compute:
        return floor + read * (_US / bandwidth)
    peak = costs.peak_flops
    if operator.kind not in (CostClass.GEMM, CostClass.EXPERTS, CostClass.LM_HEAD):
        # Scores and scans stay in 16 bits.
        peak = _TERA * hardware.tflops_16bit
    spent = roofline_us(
        operator.flops_per_unit * units, read, compute * peak, bandwidth, floor, xp
    )
    if operator.kind == CostClass.ATTENTION_PREFILL:
        # Tiles are loaded and stored before and after their products, not beside.
        rate = rates.attention_stream_bandwidth * hardware.memory_tb_s * _TERA
        streamed = operator.stream_bytes * loads["prefill_tokens"]
        spent = spent + streamed * (_US / rate)
    if operator.kind == CostClass.SCAN:
        longest = loads["prefill_tokens"] / xp.maximum(loads["num_chunks"], 1.0)
        spent = xp.maximum(spent, floor + rates.scan_serial_us * longest)
    return spent


def _read_once(operator: Operator, units: Array, xp: ModuleType) -> Array:
    """Bytes of weights, of experts only those that some token is sent to."""
    if not operator.experts:
        return operator.fixed_bytes
    experts, of_token = operator.experts
    if of_token == experts:
        return operator.fixed_bytes
    untouched = xp.exp(units * math.log1p(-of_token / experts))
    return operator.fixed_bytes * (1.0 - untouched)


def roofline_us(
    flops: Array,
    read: Array,
    speed: float,
    bandwidth: float,
    floor: float,
    xp: ModuleType = np,
) -> Array:
    """Microseconds of a kernel.

    Args:
      flops: floating point operations.
      read: bytes read and written.
      speed: FLOP/s that it reaches.
      bandwidth: bytes a second that it reaches.
      floor: microseconds that it takes in any case.
      xp: `numpy`, or `jax.numpy` inside `jit`.
    """
    return floor + xp.maximum(flops * (_US / speed), read * (_US / bandwidth))
