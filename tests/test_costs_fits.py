"""Fits find what made the data, never test on what they saw, and state their error."""

import numpy as np
import pytest

from jaxsched.simulation.costs import StepLoad, step_costs, step_us
from jaxsched.simulation.costs_calibration import (
    Coefficient,
    fit,
    halves,
    relative_errors,
)
from jaxsched.simulation.costs_hardware import find_hardware
from jaxsched.simulation.costs_linear import (
    OperatingRange,
    draw_steps,
    linear_costs,
    replay_line,
    snapshot_us,
    tabled_costs,
)
from jaxsched.simulation.costs_models import describe_model
from jaxsched.simulation.costs_serving import ServingLoad, serving_times_us
from jaxsched.simulation.costs_tables import gemm_table, gemm_times, read_rows
from shared_data import shared_path

STEPS = OperatingRange(num_steps=512)


@pytest.fixture(scope="module")
def dense():
    return step_costs(describe_model("Nemotron-H-8B"), find_hardware("H200"))


@pytest.fixture(scope="module")
def sparse():
    name = "Nemotron-3-Nano-30B-A3B"
    return step_costs(describe_model(name), find_hardware("H200"))


def test_a_fit_finds_the_coefficients_that_made_the_points():
    draw = np.random.default_rng(5)
    x = draw.uniform(1, 1000, 200)
    measured = 7.0 + np.maximum(0.3 * x, 40.0)

    def predict(values, mask):
        return values["floor"] + np.maximum(values["slope"] * x[mask], 40.0)

    found = fit(
        predict,
        [
            Coefficient(name="floor", start=1, low=0.1, high=100),
            Coefficient(name="slope", start=1, low=0.01, high=10),
        ],
        measured,
        halves(list(range(200))),
    )
    assert found.values == pytest.approx({"floor": 7.0, "slope": 0.3}, rel=1e-4)
    assert found.median_error < 1e-4
    assert len(found.fit_errors) == len(found.test_errors) == 100


def test_a_fit_stays_inside_of_its_limits():
    x = np.linspace(1, 10, 20)

    def predict(values, mask):
        return values["slope"] * x[mask]

    chosen = [Coefficient(name="slope", start=1, low=0.5, high=2)]
    found = fit(predict, chosen, 5 * x, np.arange(20) < 10)
    assert found.values["slope"] == pytest.approx(2)
    assert found.median_error == pytest.approx(0.6)
    with pytest.raises(ValueError, match="1 coefficients need as many points, got 0"):
        fit(predict, chosen, 5 * x, np.zeros(20, bool))
    with pytest.raises(ValueError, match="slope: 0 < low <= start <= high"):
        Coefficient(name="slope", start=3, low=0.5, high=2)


def test_copies_of_a_point_stay_in_one_half():
    keys = [(index % 40, "x") for index in range(200)]
    for seed in range(5):
        chosen = halves(keys, seed)
        for key in set(keys):
            mine = [bool(c) for c, k in zip(chosen, keys, strict=True) if k == key]
            assert len(set(mine)) == 1
        assert chosen.sum() == 100


def test_relative_errors_are_shares_of_what_was_measured():
    assert relative_errors([150, 50], [100, 100]).tolist() == [0.5, 0.5]


def evaluate(line, load):
    """The line by its definition, microseconds."""
    tokens = load.prefill_tokens + load.decode_rows
    table = getattr(line, "tokens", None)
    base = np.interp(tokens, table, line.base_us) if table else line.base_us
    return (
        base
        + line.prefill_token_us * load.prefill_tokens
        + line.decode_row_us * load.decode_rows
        + line.context_token_ns / 1000 * load.context_tokens
        + line.token_pair_ns / 1000 * load.token_pairs
        + line.snapshot_us * load.snapshots_written
    )


@pytest.mark.parametrize("form", [linear_costs, tabled_costs])
@pytest.mark.parametrize("model", ["dense", "sparse"])
def test_a_line_is_as_far_off_as_it_says(form, model, request):
    costs = request.getfixturevalue(model)
    line = form(costs, STEPS)
    load, _ = draw_steps(STEPS)
    errors = relative_errors(evaluate(line, load), step_us(costs, load))
    assert np.median(errors) == pytest.approx(line.median_error)
    assert np.quantile(errors, 0.9) == pytest.approx(line.p90_error)
    assert errors.max() == pytest.approx(line.max_error)


def test_errors_on_steps_that_no_fit_has_seen(dense, sparse):
    other, _ = draw_steps(OperatingRange(num_steps=512, seed=9))
    for costs, form, most in (
        (dense, linear_costs, 0.08),
        (dense, tabled_costs, 0.07),
        (sparse, tabled_costs, 0.06),
    ):
        line = form(costs, STEPS)
        errors = relative_errors(evaluate(line, other), step_us(costs, other))
        assert np.median(errors) < most
    # Experts bend the curve: without a table the line is far off.
    plain, tabled = linear_costs(sparse, STEPS), tabled_costs(sparse, STEPS)
    assert plain.median_error > 3 * tabled.median_error


def test_the_clock_gets_whole_picoseconds(dense):
    line = linear_costs(dense, STEPS)
    found = line.picoseconds()
    assert all(type(value) is int for value in found.values())
    assert found["prefill_token"] == round(line.prefill_token_us * 1e6)
    assert found["context_token"] == round(line.context_token_ns * 1e3)
    assert found["snapshot"] == round(snapshot_us(dense) * 1e6) > 0


def test_three_numbers_fit_a_replay_config(dense):
    from jaxsched.simulation.replay_config import ReplayConfig

    line = replay_line(dense, STEPS)
    config = ReplayConfig(
        step_ms=line.step_ms, token_us=line.token_us, context_ns=line.context_ns
    )
    load, ends = draw_steps(OperatingRange(num_steps=512, snapshots=False))
    tokens = load.prefill_tokens + load.decode_rows
    time = config.base_ps + config.token_ps * tokens
    time += config.context_ps * (load.context_tokens + ends)
    errors = relative_errors(time / 1e6, step_us(dense, load))
    assert np.median(errors) == pytest.approx(line.median_error, rel=0.01)


def test_a_quarter_of_the_steps_decode_only_and_limits_hold():
    load, ends = draw_steps(OperatingRange(max_tokens=1000, max_context=5000))
    tokens = load.prefill_tokens + load.decode_rows
    assert tokens.max() <= 1000 and tokens.min() >= 1
    assert np.mean(load.prefill_tokens == 0) == np.mean(load.decode_rows == 0) == 0.25
    assert np.all(load.context_tokens <= 5000 * load.decode_rows)
    assert np.all(ends <= 5001 * load.num_chunks)
    assert np.all(load.snapshots_written <= load.num_chunks)


def test_a_server_with_one_user_takes_its_own_steps(dense):
    load = ServingLoad(prompt_tokens=2048, output_tokens=100, concurrency=1)
    first, each = serving_times_us(dense, load)
    prefill = step_us(
        dense,
        StepLoad(prefill_tokens=2048.0, token_pairs=2048 * 2049 / 2, num_chunks=1.0),
    )
    decode = step_us(dense, StepLoad(decode_rows=1.0, context_tokens=2098.0))
    assert first == pytest.approx(prefill + decode / 2)
    assert each == pytest.approx(decode + prefill / 100)


def test_more_users_wait_longer_and_hits_help(dense):
    users = np.array([1.0, 8.0, 64.0, 256.0])
    load = ServingLoad(prompt_tokens=4000, output_tokens=500, concurrency=users)
    first, each = serving_times_us(dense, load, burst_share=0.3)
    assert np.all(np.diff(first) > 0) and np.all(np.diff(each) > 0)
    hit_first, hit_each = serving_times_us(
        dense, load, burst_share=0.3, computed_share=0.4
    )
    assert np.all(hit_first < first) and np.all(hit_each < each)


def test_measured_products_are_found_again_and_interpolated():
    times = gemm_times(read_rows(shared_path("costs/h200_vllm0.24_gemm_bf16.csv.gz")))
    table = gemm_table(times, inputs=4096, outputs=4096)
    mine = times[(times[:, 1] == 4096) & (times[:, 2] == 4096)]
    measured = dict(zip(mine[:, 0], mine[:, 3], strict=True))
    assert dict(zip(table.load, table.time_us, strict=True)) == measured
    at = table.load.index(4096.0)
    small, large = (gemm_table(times, 4096, n).time_us[at] for n in (4096, 5120))
    between = gemm_table(times, 4096, 4608)
    place = between.load.index(4096.0)
    assert between.time_us[place] == pytest.approx((small + large) / 2)
    with pytest.raises(ValueError, match="inputs must lie within"):
        gemm_table(times, 8, 4096)
