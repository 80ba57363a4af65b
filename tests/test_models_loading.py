"""A checkpoint loads whole or not at all, and what is wrong with it is named."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxsched.models.families import FAMILIES
from jaxsched.models.loading import check_parameters, load_checkpoint
from jaxsched.models.moe import MoeForm
from jaxsched.models.naming import sources
from jaxsched.models.parameters import count_parameters, parameter_shapes
from jaxsched.models.serving import _named_leaves, abstract_model
from model_cases import FALCON, NEMOTRON, SHARED, copy_of, tiny
from shared_data import shared_path


@pytest.fixture
def folder(tmp_path):
    return copy_of(FALCON, tmp_path / "model")


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def write(folder, weights, name="model.safetensors"):
    save_file(weights, folder / name)


def in_shards(folder, weights, count=3):
    """The same weights in shards with an index."""
    (folder / "model.safetensors").unlink()
    owner = {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = dict(list(weights.items())[shard::count])
        write(folder, part, name)
        owner |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": owner}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return owner


def same(first, second):
    assert list(first) == list(second)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


def test_names_and_shapes_are_those_of_the_module():
    import flax.nnx as nnx
    import jax

    for family in FAMILIES:
        config = tiny(family)
        model = abstract_model(config, "float32", MoeForm.DENSE)
        leaves = dict(_named_leaves(nnx.state(model)))
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        assert shapes == parameter_shapes(config)
        assert count_parameters(config) == sum(leaf.size for leaf in leaves.values())
        assert all(isinstance(v, jax.ShapeDtypeStruct) for v in leaves.values())


def test_every_parameter_has_one_source_of_its_own():
    for family in FAMILIES:
        config = tiny(family)
        found = sources(config)
        names = [name for source in found.values() for name in source.names]
        assert list(found) == list(parameter_shapes(config))
        assert len(names) == len(set(names))


def test_joined_matrices_keep_their_order():
    _, parameters = load_checkpoint(FALCON)
    raw = weights_of(FALCON)
    base = "model.layers.1.self_attn"
    parts = [raw[f"{base}.{name}_proj.weight"] for name in "qkv"]
    joined = parameters["layers.1.attention.qkv.weight"]
    np.testing.assert_array_equal(joined, np.concatenate(parts))
    base = "model.layers.0.feed_forward"
    parts = [raw[f"{base}.{name}_proj.weight"] for name in ("gate", "up")]
    up = parameters["layers.0.mlp.up.weight"]
    np.testing.assert_array_equal(up, np.concatenate(parts))


def test_experts_are_stacked_in_order():
    _, parameters = load_checkpoint(NEMOTRON)
    raw = weights_of(NEMOTRON)
    for expert in range(8):
        name = f"backbone.layers.3.mixer.experts.{expert}.down_proj.weight"
        got = parameters["layers.3.moe.experts.down"][expert]
        np.testing.assert_array_equal(got, raw[name])


def test_shards_and_several_files_load_like_one(folder):
    _, right = load_checkpoint(folder)
    in_shards(folder, weights_of(folder))
    same(load_checkpoint(folder)[1], right)
    (folder / "model.safetensors.index.json").unlink()
    same(load_checkpoint(folder)[1], right)


def test_bfloat16_rounds_all_but_the_exponents(folder):
    _, exact = load_checkpoint(folder)
    config, rounded = load_checkpoint(folder, "bfloat16")
    check_parameters(config, rounded, "bfloat16")
    for name, values in rounded.items():
        wide = name.endswith(("A_log", "dt_bias", ".D"))
        right = exact[name] if wide else exact[name].astype(ml_dtypes.bfloat16)
        assert values.dtype == right.dtype
        np.testing.assert_array_equal(values, right)
    narrow = {k: v.astype(ml_dtypes.bfloat16) for k, v in weights_of(folder).items()}
    write(folder, narrow)
    _, widened = load_checkpoint(folder)
    kept = widened["embed.weight"]
    np.testing.assert_array_equal(kept, rounded["embed.weight"].astype(np.float32))


def refused(folder, *said):
    with pytest.raises(ValueError) as wrong:
        load_checkpoint(folder)
    for text in (str(folder), *said):
        assert text in str(wrong.value)


def test_missing_tensors_are_named(folder):
    weights = weights_of(folder)
    del weights["model.layers.1.mamba.A_log"], weights["lm_head.weight"]
    write(folder, weights)
    refused(folder, "2 tensors missing", "model.layers.1.mamba.A_log", "lm_head.weight")


def test_extra_tensors_are_named(folder):
    extra = {"model.layers.2.mamba.D": np.ones(4, np.float32)}
    write(folder, weights_of(folder) | extra)
    refused(folder, "1 tensors not part of this model: model.layers.2.mamba.D")


@pytest.mark.parametrize(
    "name, shape",
    [
        ("model.layers.0.self_attn.k_proj.weight", (32, 32)),
        ("model.layers.0.mamba.conv1d.weight", (96, 4)),
        ("model.embed_tokens.weight", (63, 32)),
    ],
)
def test_misshapen_tensors_are_named(folder, name, shape):
    write(folder, weights_of(folder) | {name: np.ones(shape, np.float32)})
    refused(folder, f"{name} must be shaped", f"got {list(shape)}")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(folder, value):
    weights = weights_of(folder)
    name = "model.layers.1.feed_forward.down_proj.weight"
    weights[name] = weights[name].copy()
    weights[name][3, 5] = value
    write(folder, weights)
    refused(folder, name, "1 values that are not finite, the first at [3, 5]")


def test_whole_numbers_are_no_weights(folder):
    name = "model.layers.0.mamba.D"
    write(folder, weights_of(folder) | {name: np.ones(4, np.int32)})
    refused(folder, f"{name} must be one of F32", "got I32")


@pytest.mark.parametrize("kept", [0, 7, 500, 100_000])
def test_a_file_cut_short_is_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, "not a whole safetensors file", f"({kept} bytes)")


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no model.safetensors")


def test_a_missing_shard_is_named(folder):
    owner = in_shards(folder, weights_of(folder))
    gone = sorted(set(owner.values()))[1]
    (folder / gone).unlink()
    refused(folder, f"shards not in the folder: {gone}")


def test_an_index_that_lies_is_refused(folder):
    owner = in_shards(folder, weights_of(folder))
    index = folder / "model.safetensors.index.json"
    name = next(iter(owner))
    other = next(file for file in owner.values() if file != owner[name])
    index.write_text(json.dumps({"weight_map": owner | {name: other}}))
    refused(folder, f"{name} must be in {other}")
    index.write_text(json.dumps({"weight_map": owner | {name: "../x.safetensors"}}))
    refused(folder, f"{name} must name a file name in the same folder")
    index.write_text("{}")
    refused(folder, "no readable weight_map")


def test_the_same_tensor_twice_is_refused(folder):
    weights = weights_of(folder)
    in_shards(folder, weights)
    (folder / "model.safetensors.index.json").unlink()
    name = next(iter(weights))
    write(folder, {name: weights[name]}, "model-extra.safetensors")
    refused(folder, f"{name} is also in")


def test_tied_models_need_no_head(tmp_path):
    folder = copy_of(FALCON, tmp_path / "tied", tie_word_embeddings=True)
    config, parameters = load_checkpoint(folder)  # its lm_head is passed over
    assert "lm_head.weight" not in parameters and config.tie_embeddings
    weights = weights_of(folder)
    del weights["lm_head.weight"]
    write(folder, weights)
    same(load_checkpoint(folder)[1], parameters)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16"):
        load_checkpoint(FALCON, "float16")


@pytest.mark.parametrize("name", SHARED)
def test_published_folders_load(name):
    config, parameters = load_checkpoint(shared_path(f"fixtures/{name}"))
    check_parameters(config, parameters)
