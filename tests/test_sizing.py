"""Invariant: a model's bytes are those of its arrays, however the model is named.

Packaged models against the collected facts of public ones, configs against the stored
checkpoints of every family, tensor parallelism against the whole.
"""

import json
import struct

import pytest

from jaxsched.cache.sizing import ElementTypes, cache_bytes, parse_bytes
from jaxsched.cache.sizing_layers import attention, mamba2, mlp
from jaxsched.cache.sizing_memory import split_layers
from jaxsched.cache.sizing_shapes import (
    ModelShape,
    find_model,
    model_names,
    public_model,
    shape_of_config,
)
from shared_data import shared_path

FAMILIES = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 mamba mamba2 "
    "nemotron_h nemotron_h_moe olmo_hybrid qwen3_5_text qwen3_next zamba2"
).split()


def small(**more):
    layers = (mamba2(64, 8, 16, 16, 2, 4), attention(64, 8, 4, 8), mlp(64, 96, True))
    return ModelShape(name="small", layers=layers, num_embedding_params=640, **more)


def test_public_models_weigh_what_is_known_of_them():
    facts = json.loads(shared_path("costs/hybrid_models.json").read_text())["models"]
    assert set(facts) == set(model_names())
    narrow = ElementTypes(state="bfloat16")
    for name, model in facts.items():
        shape, known = public_model(name), model["derived"]
        sizes = cache_bytes(shape)
        assert sizes.kv_per_token == known["kv_bytes_per_token_bf16"], name
        assert sizes.state == known["snapshot_bytes_fp32ssm_bf16conv"], name
        assert cache_bytes(shape, narrow).state == known["snapshot_bytes_bf16"], name
        assert shape.num_params == known["params_total"], name
        assert shape.max_context_length == model["ctx"], name
        assert sizes.weights == 2 * shape.num_params


def test_well_known_sizes():
    """Stand alone: figures that a deployer meets in the documents of these models."""
    nano = cache_bytes(public_model("Nemotron-3-Nano-30B-A3B"))
    assert (nano.kv_per_token, nano.state) == (6_144, 49_082_368)
    assert round(nano.state_in_kv_tokens, 1) == 7988.7
    qwen = cache_bytes(public_model("Qwen3-Next-80B-A3B"))
    assert (qwen.kv_per_token, qwen.state) == (24_576, 77_266_944)
    kimi = cache_bytes(public_model("Kimi-Linear-48B-A3B"))
    assert (kimi.kv_per_token, kimi.state) == (8_064, 43_417_600)


def _tensors(path):
    """Names and shapes of a safetensors file, from its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: tensor["shape"] for name, tensor in header.items()}


def _count(shape):
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_describe_the_stored_checkpoints(family):
    """States exactly; keys and values exactly; weights but for norms and biases."""
    folder = shared_path(f"fixtures/{family}")
    shape = find_model(str(folder))
    states = _tensors(folder / "states.safetensors")
    recurrent, conv, kv = 0, 0, 0
    for name, size in states.items():
        batch = size[0]
        if "recurrent" in name:
            recurrent += _count(size) // batch
        elif "conv" in name:
            kept = size[-1] - 1  # one column more is stored than the next step reads
            conv += _count(size[1:-1]) * kept
        else:
            kv += _count(size) // batch // size[2]
    assert sum(layer.state_elements for layer in shape.layers) == recurrent
    assert sum(layer.conv_elements for layer in shape.layers) == conv
    if family != "kimi_linear":  # it stores the keys that its latent vector expands to
        assert sum(layer.kv_elements for layer in shape.layers) == kv
    stored = sum(_count(s) for s in _tensors(folder / "model.safetensors").values())
    missing = 0.1 if family == "zamba2" else 0.025  # adapters of its shared blocks
    assert stored * (1 - missing) < shape.num_params <= stored


def test_tensor_parallel_ranks_share_the_whole():
    whole, half = cache_bytes(small()), cache_bytes(small(), tensor_parallel=2)
    assert half.state * 2 == whole.state
    assert half.kv_per_token * 2 == whole.kv_per_token
    assert half.weights * 2 == whole.weights
    # Fewer KV heads than ranks: each is stored twice.
    assert cache_bytes(small(), tensor_parallel=8).kv_per_token == 2 * 8 * 2


def test_a_latent_vector_is_stored_by_every_rank():
    shape = public_model("Kimi-Linear-48B-A3B")
    sizes = cache_bytes(shape, tensor_parallel=4)
    assert sizes.kv_per_token == cache_bytes(shape).kv_per_token


@pytest.mark.parametrize(("ranks", "what"), [(3, "KV heads|8 heads"), (16, "heads")])
def test_what_cannot_be_divided_is_refused(ranks, what):
    with pytest.raises(
        ValueError, match=f"tensor_parallel={ranks} must divide.*{what}"
    ):
        cache_bytes(small(), tensor_parallel=ranks)


def test_pipeline_ranks_without_attention_or_without_states():
    """M M M M A A over three ranks: the last stores no state, the first no KV."""
    layers = [mamba2(64, 8, 16, 16, 2, 4)] * 4 + [attention(64, 8, 4, 8)] * 2
    shape = ModelShape(name="six", layers=tuple(layers), num_embedding_params=0)
    ranks = [cache_bytes(shape, layers=part) for part in split_layers(layers, 3)]
    assert [rank.kv_per_token > 0 for rank in ranks] == [False, False, True]
    assert [rank.state > 0 for rank in ranks] == [True, True, False]
    assert ranks[0].state_in_kv_tokens == float("inf")
    assert sum(rank.kv_per_token for rank in ranks) == cache_bytes(shape).kv_per_token
    assert [len(part) for part in split_layers(layers, 4)] == [2, 2, 1, 1]
    with pytest.raises(ValueError, match="pipeline_parallel=7"):
        split_layers(layers, 7)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("141GB", 141 * 10**9), ("1.5 GiB", 3 * 2**29), ("512", 512), ("2k", 2000)]
    + [(7, 7), ("3 MiB", 3 * 2**20), ("1TB", 10**12), ("12B", 12)],
)
def test_amounts_of_memory(text, amount):
    assert parse_bytes("memory", text) == amount


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "3 apples", "1e9", None])
def test_bad_amounts_of_memory(text):
    with pytest.raises(ValueError, match="memory must be"):
        parse_bytes("memory", text)


def test_element_types_are_checked_and_counted():
    with pytest.raises(ValueError, match="kv type must be one of"):
        ElementTypes(kv="float7")
    eight = cache_bytes(small(), ElementTypes(kv="float8", weights="float8"))
    assert eight.kv_per_token * 2 == cache_bytes(small()).kv_per_token
    assert eight.weights * 2 == cache_bytes(small()).weights


CONFIG = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not known"),
        ({"num_heads": None}, "num_heads is missing"),
        ({"num_heads": "8"}, "num_heads must be an integer"),
        ({"state_size": 0}, "state_size must be an integer >= 1"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"model_type": "lfm2"}, "layer_types is missing"),
        (
            {"model_type": "lfm2", "layer_types": ["conv"]},
            "num_hidden_layers=2 does not fit the 1 entries",
        ),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mlp", "moon"]},
            "intermediate_size is missing",
        ),
    ],
)
def test_bad_configs_are_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        shape_of_config({**CONFIG, **change})


def test_old_spellings_of_configs():
    """The layer pattern as one word, and a language model inside a larger one."""
    config = {
        "model_type": "nemotron_h",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 96,
        "vocab_size": 10,
    }
    kinds = [layer.kind for layer in shape_of_config(config).layers]
    assert kinds == ["mamba2", "attention", "mlp"]
    wrapped = shape_of_config({"text_config": config})
    assert wrapped.layers == shape_of_config(config).layers


def test_models_are_found_by_name_in_any_case_and_by_path(tmp_path):
    assert find_model("bamba-9b").name == "Bamba-9B"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert find_model(str(tmp_path)).num_state_layers == 2
    with pytest.raises(ValueError, match="neither a known name nor a config.json"):
        find_model(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: cannot be read as JSON"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="a config must be a JSON object, got list"):
        find_model(str(tmp_path))
