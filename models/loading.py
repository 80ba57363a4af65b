"""A Hugging Face checkpoint folder as a `ModelConfig` and named parameters."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxsched.models.checkpoint import Checkpoint
from jaxsched.models.config import ModelConfig
from jaxsched.models.families import read_config
from jaxsched.models.naming import Source, published_shapes, sources
from jaxsched.models.parameters import is_float32, parameter_shapes

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Names that older releases wrote for the same tensor.
_OLD_NAMES = {"backbone.embeddings.weight": "backbone.embedding.weight"}
# Derived from the configuration, or heads for multi-token prediction: not read here.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".mup_vector")
_IGNORED_STARTS = {"nemotron_h": ("mtp.",)}
_SHOWN = 6


def load_checkpoint(
    folder: str | Path, dtype: str = "float32"
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Reads `config.json` and the weights of a folder.

    The weights are `model.safetensors`, or `model.safetensors.index.json` and its
    shards, or several `model*.safetensors`. Values are converted to `dtype`; the few
    parameters that enter exponentials stay in float32.

    Args:
      folder: a folder as `save_pretrained` of transformers writes it.
      dtype: "float32" or "bfloat16".

    Returns:
      The configuration, and one array a parameter under the names of
      `parameters.parameter_shapes`.

    Raises:
      ValueError: if a file is missing, cut short, or does not fit the configuration:
        the text names the file and each missing, extra or misshapen tensor; also if a
        weight is NaN or infinite.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    return config, read_parameters(config, checkpoint, dtype)


def read_parameters(
    config: ModelConfig, checkpoint: Checkpoint, dtype: str
) -> dict[str, np.ndarray]:
    """The parameters of a model out of an open checkpoint; see `load_checkpoint`."""
    shapes = parameter_shapes(config)
    wanted = {
        name: _with_old_names(source, checkpoint)
        for name, source in sources(config).items()
    }
    _check_names(config, wanted, checkpoint)
    _check_shapes(config, wanted, shapes, checkpoint)
    return {
        name: _read(checkpoint, wanted[name], shapes[name], _dtype(name, dtype))
        for name in shapes
    }


def check_parameters(
    config: ModelConfig, parameters: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Raises ValueError unless the parameters are those of the model, typed `dtype`."""
    shapes = parameter_shapes(config)
    _complain("parameters", "missing", sorted(set(shapes) - set(parameters)))
    _complain("parameters", "unknown", sorted(set(parameters) - set(shapes)))
    for name, shape in shapes.items():
        got = (parameters[name].shape, parameters[name].dtype)
        right = (shape, _dtype(name, dtype))
        if got != right:
            raise ValueError(
                f"{name} must be {right[1]}{right[0]}, got {got[1]}{got[0]}"
            )


def _dtype(name: str, dtype: str) -> np.dtype:
    return DTYPES["float32" if is_float32(name) else dtype]


def _with_old_names(source: Source, checkpoint: Checkpoint) -> Source:
    names = tuple(
        _OLD_NAMES[name]
        if name not in checkpoint.names and _OLD_NAMES.get(name) in checkpoint.names
        else name
        for name in source.names
    )
    return Source(names, source.how)


def _check_names(
    config: ModelConfig, wanted: Mapping[str, Source], checkpoint: Checkpoint
) -> None:
    needed = {name for source in wanted.values() for name in source.names}
    missing = sorted(needed - checkpoint.names)
    extra = sorted(
        name for name in checkpoint.names - needed if not _ignored(config, name)
    )
    where = str(checkpoint.folder)
    if "lm_head.weight" in missing and config.tie_embeddings is False:
        where += " (tie_word_embeddings is false, so lm_head.weight is needed)"
    _complain(where, "missing", missing)
    _complain(where, "not part of this model", extra)


def _ignored(config: ModelConfig, name: str) -> bool:
    if config.tie_embeddings and name == "lm_head.weight":
        return True
    starts = _IGNORED_STARTS.get(config.family, ())
    return name.endswith(_IGNORED_ENDINGS) or name.startswith(starts)


def _complain(where: str, what: str, names: Iterable[str]) -> None:
    names = list(names)
    if not names:
        return
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ValueError(f"{where}: {len(names)} tensors {what}: {shown}{more}")


def _check_shapes(
    config: ModelConfig,
    wanted: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> None:
    for name, source in wanted.items():
        right = published_shapes(config, name, source, shapes[name])
        for tensor, shape in zip(source.names, right, strict=True):
            if checkpoint.shape(tensor) != shape:
                got = list(checkpoint.shape(tensor))
                raise ValueError(
                    f"{checkpoint.where(tensor)} must be shaped {list(shape)} by "
                    f"config.json, got {got}"
                )


def _read(
    checkpoint: Checkpoint, source: Source, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    pieces = [checkpoint.read(name).astype(dtype) for name in source.names]
    if source.how == "stack":
        return np.stack(pieces)
    if len(pieces) == 1:
        return pieces[0].reshape(shape)
    return np.concatenate(pieces)
