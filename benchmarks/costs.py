"""How far the roofline is off: kernels, whole servers, a replay's clock.

Coefficients are fitted on one half of the measured points; errors are those of the
other half. Points that repeat each other stay on one side. Five random halves are
taken; the table pools their errors. Measurements: kernels of one H200, and servers of
three generations, published with aiconfigurator-core 0.12.0 (Apache-2.0).
"""

import argparse
import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.costs_points import (
    KERNELS,
    KernelPoints,
    Setup,
    kernel_points,
    serving_points,
)
from jaxsched.simulation.costs import StepCosts, roofline_us, step_costs
from jaxsched.simulation.costs_calibration import Coefficient, Fit, fit, halves
from jaxsched.simulation.costs_hardware import find_hardware
from jaxsched.simulation.costs_linear import linear_costs, replay_line, tabled_costs
from jaxsched.simulation.costs_models import describe_model
from jaxsched.simulation.costs_serving import ServingLoad, serving_times_us

SPLITS = 5
_MIN_POINTS = 8
_MODELS = ("Nemotron-H-8B", "Nemotron-3-Nano-30B-A3B", "Qwen3-Next-80B-A3B")

_SHARE = {"low": 0.02, "high": 1.0}
KERNEL = {
    "compute": Coefficient(name="compute", start=0.5, **_SHARE),
    "bandwidth": Coefficient(name="bandwidth", start=0.7, **_SHARE),
    "stream_bandwidth": Coefficient(name="stream_bandwidth", start=0.5, **_SHARE),
    "floor_us": Coefficient(name="floor_us", start=5, low=0.3, high=60),
    "row_tokens": Coefficient(name="row_tokens", start=100, low=1, high=2000),
    "serial_us": Coefficient(name="serial_us", start=0.05, low=1e-4, high=5),
}
TPOT = (
    Coefficient(name="compute", start=0.9, low=0.1, high=1.25),
    Coefficient(name="bandwidth", start=1.0, low=0.1, high=1.2),
    Coefficient(name="step_us", start=2000, low=50, high=30_000),
    Coefficient(name="row_us", start=10, low=0.1, high=500),
)
COMPUTED = Coefficient(name="computed_share", start=0.9, low=0.01, high=1.0)
TTFT = (
    Coefficient(name="chunk_us", start=1000, low=1, high=500_000),
    Coefficient(name="burst_share", start=0.3, low=1e-4, high=2.0),
    Coefficient(name="first_us", start=10_000, low=10, high=500_000),
)


def main(args: argparse.Namespace) -> dict:
    """Prints the tables; returns their figures."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("JAXSCHED_SHARED", default)) / "costs"
    splits = 1 if args.quick else SPLITS
    return {
        "kernels": kernels(folder, splits),
        "servers": servers(folder, splits),
        "lines": lines(),
    }


def kernels(folder: Path, splits: int) -> dict[str, dict]:
    """Rooflines of single kernels."""
    found = {}
    for name in KERNELS:
        points = kernel_points(folder, name)
        fits = [_fit_kernel(points, seed) for seed in range(splits)]
        found[name] = {"points": len(points.keys), **_summary(fits)}
    harness.print_table(
        "kernels on one H200: |roofline / measured - 1|, other half",
        ["kernel", "points", "median", "p90", "coefficients"],
        [
            [
                name,
                f"{row['points']:,}",
                _percent(row["median"]),
                _percent(row["p90"]),
                _named(row["values"]),
            ]
            for name, row in found.items()
        ],
    )
    return found


def _fit_kernel(points: KernelPoints, seed: int) -> Fit:
    def predict(values: Mapping[str, float], mask: np.ndarray) -> np.ndarray:
        floor = values["floor_us"]
        rows = values.get("row_tokens", 0.0) * points.row_bytes[mask]
        spent = roofline_us(
            points.flops[mask],
            points.bytes_moved[mask] + rows,
            values.get("compute", 1.0) * points.peak_flops,
            values.get("bandwidth", 1.0) * points.peak_bytes,
            floor,
        )
        stream = values.get("stream_bandwidth", 1.0) * points.peak_bytes
        spent = spent + points.stream_bytes[mask] * (1e6 / stream)
        serial = values.get("serial_us", 0.0) * points.serial_tokens[mask]
        return np.maximum(spent, floor + serial)

    chosen = [KERNEL[one] for one in points.coefficients]
    return fit(predict, chosen, points.time_us, halves(points.keys, seed))


def servers(folder: Path, splits: int) -> dict[str, dict]:
    """Time per output token and to the first one, by server and pooled by system."""
    found, pooled = {}, defaultdict(lambda: defaultdict(list))
    for setup in serving_points(folder):
        if len(setup.keys) < _MIN_POINTS:
            continue
        fits: dict[str, list[Fit]] = defaultdict(list)
        constant = []
        for seed in range(splits):
            half = halves(setup.keys, seed)
            fits["tpot"].append(_fit_server(setup, TPOT, half))
            shared = _fit_server(setup, (*TPOT, COMPUTED), half)
            fits["tpot_shared"].append(shared)
            fits["ttft"].append(_fit_server(setup, TTFT, half, shared.values))
            typical = np.median(setup.tpot_us[half])
            constant.append(np.abs(typical / setup.tpot_us[~half] - 1))
        row = {kind: _summary(some) for kind, some in fits.items()}
        row |= {"points": len(setup.keys), "tpot_constant": _median(constant)}
        found[setup.name] = row
        for kind, some in fits.items():
            pooled[setup.system][kind] += [one.test_errors for one in some]
        pooled[setup.system]["tpot_constant"] += constant
    for system, kinds in pooled.items():
        row = {kind: {"median": _median(errors)} for kind, errors in kinds.items()}
        row["tpot_constant"] = row["tpot_constant"]["median"]
        found[f"{system}, all its points"] = row
    _print_servers(found)
    return found


def _fit_server(
    setup: Setup,
    chosen: Sequence[Coefficient],
    half: np.ndarray,
    known: Mapping[str, float] | None = None,
) -> Fit:
    """Fits times per output token, or with known coefficients those to the first."""
    hardware = find_hardware(setup.system)
    costs = {
        ranks: step_costs(
            setup.model, hardware, setup.types, tensor_parallel=int(ranks)
        )
        for ranks in set(setup.ranks)
    }

    def predict(values: Mapping[str, float], mask: np.ndarray) -> np.ndarray:
        values = {**(known or {}), **values}
        times = np.zeros((2, len(setup.ranks)))
        for ranks, one in costs.items():
            mine = setup.ranks == ranks
            times[:, mine] = _serve(one, setup, mine, values)
        return times[0 if known else 1][mask]

    return fit(predict, chosen, setup.ttft_us if known else setup.tpot_us, half)


def _serve(
    costs: StepCosts, setup: Setup, mine: np.ndarray, values: Mapping[str, float]
) -> np.ndarray:
    efficiency = costs.hardware.efficiency.scaled(
        compute=values["compute"], bandwidth=values["bandwidth"]
    )
    host = {
        name: values[name]
        for name in ("step_us", "row_us", "chunk_us")
        if name in values
    }
    load = ServingLoad(
        prompt_tokens=setup.prompt_tokens[mine],
        output_tokens=setup.output_tokens[mine],
        concurrency=setup.concurrency[mine],
    )
    times = serving_times_us(
        costs.with_efficiency(dataclasses.replace(efficiency, **host)),
        load,
        computed_share=values.get("computed_share", 1.0),
        burst_share=values.get("burst_share", 0.0),
        first_us=values.get("first_us", 0.0),
    )
    return np.array(times)


def _print_servers(found: dict[str, dict]) -> None:
    rows = []
    for name, row in found.items():
        figures = [row["tpot"], row["tpot_shared"], row["ttft"]]
        rows.append(
            [
                name,
                f"{row['points']:,}" if "points" in row else "",
                *(_percent(one["median"]) for one in figures),
                _percent(row["tpot_constant"]),
            ]
        )
    harness.print_table(
        "servers: median |predicted / measured - 1|, other half",
        ["system", "points", "TPOT", "TPOT, hits", "TTFT", "TPOT, constant"],
        rows,
    )
    harness.print_table(
        "coefficients (TPOT; time to first token)",
        ["system", "values"],
        [
            [name, _named(row["tpot"]["values"]) + "; " + _named(row["ttft"]["values"])]
            for name, row in found.items()
            if "points" in row
        ],
    )


def lines() -> dict[str, dict]:
    """The numbers of an integer clock: how far a line is from the roofline."""
    found, rows = {}, []
    for name in _MODELS:
        costs = step_costs(describe_model(name), find_hardware("H200"))
        forms = {
            "base by tokens, five slopes": tabled_costs(costs),
            "base, five slopes": linear_costs(costs),
            "base, tokens, context": replay_line(costs),
        }
        for form, line in forms.items():
            found[f"{name}, {form}"] = dataclasses.asdict(line)
            errors = (line.median_error, line.p90_error, line.max_error)
            rows.append([name, form, *map(_percent, errors)])
    harness.print_table(
        "a replay's clock against the roofline, one H200, steps of up to 8,192 tokens",
        ["model", "form", "median", "p90", "largest"],
        rows,
    )
    return found


def _summary(fits: Sequence[Fit]) -> dict:
    errors = np.concatenate([one.test_errors for one in fits])
    return {
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "medians": [one.median_error for one in fits],
        "values": dict(fits[0].values),
    }


def _median(errors: Sequence[np.ndarray]) -> float:
    return float(np.median(np.concatenate(errors)))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _named(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in values.items())


if __name__ == "__main__":
    harness.run(__doc__, main)
