"""A step costs the sum of its kernels' rooflines, as a calculation by hand has them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.cache.sizing import ElementTypes
from jaxsched.cache.sizing_models import PUBLIC_MODELS
from jaxsched.simulation.costs import (
    StepLoad,
    pairs_of_chunk,
    step_costs,
    step_times_us,
    step_us,
)
from jaxsched.simulation.costs_hardware import Efficiency, Hardware, find_hardware
from jaxsched.simulation.costs_models import describe_model
from jaxsched.simulation.costs_operators import CostClass
from jaxsched.simulation.costs_tables import MeasuredTable
from shared_data import shared_path

# Round numbers: 100 TFLOP/s and 1 TB/s, reached in full, and no floors.
PLAIN = Efficiency(
    **{
        field.name: 1.0 if field.name.endswith(("_compute", "_bandwidth")) else 0.0
        for field in dataclasses.fields(Efficiency)
    }
)
ROUND = Hardware(
    name="round",
    tflops_16bit=100.0,
    tflops_8bit=200.0,
    memory_tb_s=1.0,
    memory_gb=100.0,
    link_gb_s=100.0,
    efficiency=PLAIN,
)
ONE_MLP = {
    "order": "-",
    "hidden": 1000,
    "mlp": (5000, False),
    "vocab": 2000,
}
ONE_MAMBA = {
    "order": "M",
    "hidden": 1024,
    "mamba2": (32, 64, 128, 1, 4),
    "vocab": 1000,
    "scan_chunk": 128,
}
ONE_ATTENTION = {"order": "*", "hidden": 512, "heads": (8, 2, 64), "vocab": 1000}


def times(model, load, hardware=ROUND, **more):
    return step_times_us(step_costs(describe_model(model), hardware, **more), load)


def test_a_matrix_product_by_hand():
    # Two products of 1000 x 5000. 2,000 tokens: 2 * 2 * 2000 * 1000 * 5000 FLOPs
    # = 4e10, at 1e14 a second 400 us. One token: weights 2 * 5e6 * 2 bytes and
    # 2 * 6000 * 2 bytes of activations, at 1e12 a second 20.024 us.
    assert times(ONE_MLP, StepLoad(prefill_tokens=2000.0))["gemm"] == pytest.approx(400)
    assert times(ONE_MLP, StepLoad(decode_rows=1.0))["gemm"] == pytest.approx(20.024)


def test_eight_bit_weights_halve_both_sides():
    eight = ElementTypes(weights="float8")
    load = StepLoad(prefill_tokens=20_000.0)
    assert times(ONE_MLP, load, types=eight)["gemm"] == pytest.approx(2000)
    one = times(ONE_MLP, StepLoad(decode_rows=1.0), types=eight)["gemm"]
    assert one == pytest.approx(10.024)


def test_a_scan_by_hand():
    # Inner width 2048, state 128, one group, chunk 128; FLOPs a token:
    # 2 * 128 * (128 + 2048) + 4 * 2048 * 128 = 1,605,632; bytes a token:
    # 2 * (2 * (2048 + 2304 + 32) + 2048) + 8 * 262144 / 128 = 38,016.
    found = times(ONE_MAMBA, StepLoad(prefill_tokens=1000.0, num_chunks=1.0))
    assert found["scan"] == pytest.approx(max(1605.632e6 / 1e8, 38_016e3 / 1e6))
    # A decode row reads and writes 32 * 64 * 128 floats and 3 * 2304 bf16 inputs.
    state = 2 * (262144 * 4 + 3 * 2304 * 2)
    found = times(ONE_MAMBA, StepLoad(decode_rows=10.0))
    assert found["state_update"] == pytest.approx(10 * state / 1e6)
    assert found["scan"] == 0


def test_a_short_scan_of_one_sequence_takes_its_serial_time():
    serial = ROUND.replace(efficiency=dataclasses.replace(PLAIN, scan_serial_us=0.5))
    one = StepLoad(prefill_tokens=1000.0, num_chunks=1.0)
    assert times(ONE_MAMBA, one, serial)["scan"] == pytest.approx(500)
    four = StepLoad(prefill_tokens=1000.0, num_chunks=4.0)
    assert times(ONE_MAMBA, four, serial)["scan"] == pytest.approx(125)


def test_attention_by_hand():
    # 4 * 8 * 64 = 2,048 FLOPs a pair; keys and values 2 * 2 * 64 * 2 = 512 bytes;
    # a prefill token moves (2 * 8 + 2 * 2) * 64 * 2 = 2,560 bytes on top.
    pairs = pairs_of_chunk(3000.0, 1000.0)
    assert pairs == 3000 * 1000 + 1000 * 1001 / 2
    load = StepLoad(prefill_tokens=1000.0, token_pairs=pairs, num_chunks=1.0)
    found = times(ONE_ATTENTION, load)
    by_hand = pairs * 2048 / 1e8 + 2560 * 1000 / 1e6
    assert found["attention_prefill"] == pytest.approx(by_hand)
    load = StepLoad(decode_rows=4.0, context_tokens=8000.0)
    assert times(ONE_ATTENTION, load)["attention_decode"] == pytest.approx(
        8000 * 512 / 1e6
    )
    rows = ROUND.replace(efficiency=dataclasses.replace(PLAIN, attention_row_tokens=50))
    assert times(ONE_ATTENTION, load, rows)["attention_decode"] == pytest.approx(
        8200 * 512 / 1e6
    )


def test_experts_read_what_some_token_is_sent_to():
    model = {
        "order": "E",
        "hidden": 1000,
        "moe": (8, 500, 0, False, 0),
        "vocab": 1000,
        "experts_per_token": 2,
    }
    weights = 8 * 2 * 1000 * 500 * 2
    moved = 2 * 2 * 1.5 * 1000 * 2
    for tokens, touched in ((1, 2 / 8), (2, 1 - 0.75**2), (50, 1 - 0.75**50)):
        found = times(model, StepLoad(decode_rows=float(tokens)))["experts"]
        assert found == pytest.approx((weights * touched + moved * tokens) / 1e6)


def test_snapshots_and_the_head_by_hand():
    state = 262144 * 4 + 3 * 2304 * 2
    load = StepLoad(
        prefill_tokens=128.0,
        num_chunks=1.0,
        snapshots_written=3.0,
        snapshots_restored=1.0,
    )
    found = times(ONE_MAMBA, load)
    assert found["snapshot"] == pytest.approx(4 * 2 * state / 1e6)
    # One row gives a token: 1024 x 1000 weights, 2 * 2024 activation bytes.
    assert found["lm_head"] == pytest.approx((1024 * 1000 * 2 + 2 * 2024) / 1e6)


def test_tensor_parallel_divides_work_and_adds_collectives():
    load = StepLoad(prefill_tokens=2000.0, num_chunks=1.0)
    two = times(ONE_MLP, load, tensor_parallel=2)
    assert two["gemm"] == pytest.approx(200)
    # A ring of two moves the stream once: 2000 * 1000 * 2 bytes at 100 GB/s.
    assert two["collective"] == pytest.approx(2000 * 1000 * 2 / 1e5)
    assert "collective" not in times(ONE_MLP, load)
    with pytest.raises(ValueError, match="tensor_parallel=3"):
        step_costs(describe_model(ONE_MAMBA), ROUND, tensor_parallel=3)


def test_idle_steps_cost_nothing_and_the_host_costs_what_it_says():
    host = dataclasses.replace(PLAIN, step_us=100.0, row_us=2.0, chunk_us=5.0)
    hardware = ROUND.replace(efficiency=host)
    assert step_us(step_costs(describe_model(ONE_MLP), hardware), StepLoad()) == 0
    found = times(
        ONE_MLP, StepLoad(prefill_tokens=9.0, decode_rows=3.0, num_chunks=2.0), hardware
    )
    assert found["overhead"] == pytest.approx(100 + 3 * 2 + 2 * 5)


@pytest.mark.parametrize("name", sorted(PUBLIC_MODELS))
def test_flops_agree_with_the_published_facts(name):
    """Linear, score and scan FLOPs against figures that were derived elsewhere."""
    facts = json.loads(shared_path("costs/hybrid_models.json").read_text())
    derived = facts["models"][name]["derived"]
    costs = step_costs(describe_model(name), ROUND)
    sums = dict.fromkeys(CostClass, 0.0)
    for one in costs.operators:
        sums[one.kind] += one.count * one.flops_per_unit
    linear = sums["gemm"] + sums["experts"] + sums["lm_head"]
    # The routers and the shared parts are counted a little differently there.
    assert linear == pytest.approx(derived["flops_per_token_linear"], rel=0.012)
    if "L" not in facts["models"][name]["order"]:
        pairs = derived["attn_flops_per_token_per_context_token"]
        assert sums["attention_decode"] == pytest.approx(pairs)
    scan = derived.get("rec_scan_flops_per_token_per_layer_chunked")
    if scan:
        assert sums["scan"] == pytest.approx(scan * derived["recurrent_layers"])
        update = derived["rec_scan_flops_per_token_per_layer_decode"]
        assert sums["state_update"] == pytest.approx(
            update * derived["recurrent_layers"]
        )


MONOTONE = [
    ({"prefill_tokens": 512.0, "num_chunks": 1.0}, "prefill_tokens"),
    ({"decode_rows": 8.0, "context_tokens": 8000.0}, "decode_rows"),
    ({"decode_rows": 8.0, "context_tokens": 8000.0}, "context_tokens"),
    ({"prefill_tokens": 512.0, "token_pairs": 2e5, "num_chunks": 1.0}, "token_pairs"),
    ({"prefill_tokens": 512.0, "num_chunks": 1.0}, "snapshots_written"),
]


@pytest.mark.parametrize("name", ["Nemotron-3-Nano-30B-A3B", "Kimi-Linear-48B-A3B"])
@pytest.mark.parametrize("base, more", MONOTONE)
def test_more_work_never_takes_less_time(name, base, more):
    costs = step_costs(describe_model(name), find_hardware("H200"))
    amounts = base.get(more, 0.0) + np.linspace(0, 20_000, 200)
    same = {key: np.full(200, value) for key, value in base.items()}
    found = step_us(costs, StepLoad(**same | {more: amounts}))
    assert np.all(np.diff(found) >= 0) and found[-1] > found[0]


def test_better_hardware_never_takes_more_time():
    model = describe_model("Nemotron-H-8B")
    load = StepLoad(
        prefill_tokens=2000.0, decode_rows=64.0, context_tokens=2e5, num_chunks=2.0
    )
    a100, h100, h200 = (
        step_us(step_costs(model, find_hardware(name)), load)
        for name in ("a100", "H100", "h200")
    )
    assert a100 > h100 > h200 > 0


def test_the_same_figures_inside_jit():
    costs = step_costs(describe_model("Qwen3-Next-80B-A3B"), find_hardware("H200"))
    rows = np.array([0.0, 1.0, 64.0, 64.0])
    load = StepLoad(
        prefill_tokens=np.array([4096.0, 0.0, 512.0, 0.0]),
        decode_rows=rows,
        context_tokens=rows * 3000,
        token_pairs=np.array([8e6, 0.0, 2e6, 0.0]),
        num_chunks=np.array([1.0, 0.0, 2.0, 0.0]),
        snapshots_written=np.array([1.0, 0.0, 0.0, 0.0]),
        snapshots_restored=np.zeros(4),
    )
    on_device = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), load)
    found = jax.jit(lambda x: step_us(costs, x, jnp))(on_device)
    np.testing.assert_allclose(found, step_us(costs, load), rtol=1e-5)


def test_a_measured_table_takes_the_place_of_the_roofline():
    table = MeasuredTable(load=(1.0, 101.0, 201.0), time_us=(10.0, 20.0, 40.0))
    model = describe_model(ONE_MLP)
    costs = step_costs(model, ROUND, tables={(1000, 5000): table})
    plain = step_costs(model, ROUND)
    rows = np.array([1.0, 51.0, 151.0, 301.0])
    found = step_times_us(costs, StepLoad(decode_rows=rows))["gemm"]
    other = step_times_us(plain, StepLoad(decode_rows=rows))["gemm"] / 2
    # Half of the work is the other product; past the end the last slope goes on.
    np.testing.assert_allclose(found - other, [10.0, 15.0, 30.0, 60.0])
    device = jax.jit(
        lambda x: step_times_us(costs, StepLoad(decode_rows=x), jnp)["gemm"]
    )(jnp.asarray(rows, jnp.float32))
    np.testing.assert_allclose(device, found, rtol=1e-5)


def test_bad_descriptions_are_refused_by_name():
    with pytest.raises(ValueError, match="memory_tb_s must be in"):
        ROUND.replace(memory_tb_s=0.0)
    with pytest.raises(ValueError, match="gemm_compute must be in .0, 1., got 1.5"):
        Efficiency(gemm_compute=1.5)
    with pytest.raises(ValueError, match="hardware must be one of H200.*got 'V100'"):
        find_hardware("V100")
    with pytest.raises(ValueError, match="vocab is missing"):
        describe_model({"order": "-", "hidden": 8})
    experts = {"order": "E", "hidden": 8, "vocab": 8, "moe": (4, 8, 0, True, 0)}
    with pytest.raises(ValueError, match="experts_per_token is missing"):
        describe_model(experts)
    with pytest.raises(ValueError, match=r"load\[1\] must be above 2"):
        MeasuredTable(load=(2.0, 2.0), time_us=(1.0, 1.0))


def test_a_config_file_gives_the_model_of_its_name(tmp_path):
    facts = PUBLIC_MODELS["Nemotron-3-Nano-30B-A3B"]
    letters = {"M": "mamba", "E": "moe", "*": "attention"}
    config = {
        "model_type": "nemotron_h",
        "layers_block_type": [letters[letter] for letter in facts["order"]],
        "num_hidden_layers": 52,
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "num_experts_per_tok": 6,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    load = StepLoad(prefill_tokens=100.0, decode_rows=5.0, context_tokens=99.0)
    read, known = (
        step_us(step_costs(describe_model(name), find_hardware("H200")), load)
        for name in (str(path), "nemotron-3-nano-30b-a3b")
    )
    assert read == pytest.approx(known)
    del config["num_experts_per_tok"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="num_experts_per_tok is missing"):
        describe_model(str(tmp_path))


def test_hardware_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    fields = {
        **{"tflops_16bit": 100.0, "tflops_8bit": 200.0, "memory_tb_s": 1.0},
        **{"memory_gb": 24.0, "link_gb_s": 30.0, "efficiency": {"step_us": 7.0}},
    }
    path.write_text(json.dumps(fields))
    found = find_hardware(str(path))
    assert (found.name, found.memory_gb) == ("mine", 24.0)
    assert found.efficiency == Efficiency(step_us=7.0)
    for name, value, message in (
        ("memory_tb_s", "fast", "memory_tb_s must be a number, got 'fast'"),
        ("memory_tbs", 1.0, "hardware has no field 'memory_tbs'"),
        ("efficiency", {"gem_us": 1.0}, "efficiency has no field 'gem_us'"),
    ):
        path.write_text(json.dumps(fields | {name: value}))
        with pytest.raises(ValueError, match=f"mine.json: {message}"):
            find_hardware(str(path))
    del fields["link_gb_s"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="link_gb_s is missing"):
        find_hardware(str(path))
