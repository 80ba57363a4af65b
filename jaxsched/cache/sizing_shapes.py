"""`ModelShape`: a model as its layers' stored elements, and where to get one."""

import dataclasses
import json
from pathlib import Path

from jaxsched.cache.sizing_configs import layers_of_config
from jaxsched.cache.sizing_layers import LayerShape
from jaxsched.cache.sizing_models import PUBLIC_MODELS, build_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What sizing needs to know of a model.

    Attributes:
      name: for people.
      layers: in the order of the model; a layer of two parts is two entries.
      num_embedding_params: token embeddings, and the output head where it is its own.
      max_context_length: tokens that the model was made for; 0: not known.
      note: what is uncertain about the figures.
    """

    name: str
    layers: tuple[LayerShape, ...]
    num_embedding_params: int
    max_context_length: int = 0
    note: str = ""

    @property
    def num_params(self) -> int:
        """Weights without norms."""
        return self.num_embedding_params + sum(one.num_params for one in self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers that store keys and values."""
        return sum(one.num_kv_heads > 0 for one in self.layers)

    @property
    def num_state_layers(self) -> int:
        """Layers with a recurrent state."""
        return sum(one.has_state for one in self.layers)

    @property
    def kv_heads_per_layer(self) -> list[int]:
        """KV heads of every layer, 0 where a layer stores no keys and values."""
        return [one.num_kv_heads for one in self.layers]


def model_names() -> list[str]:
    """Names of the packaged models."""
    return sorted(PUBLIC_MODELS)


def find_model(name: str) -> ModelShape:
    """A packaged model by its name, or the model of a `config.json`.

    Args:
      name: a name of `model_names()`, whatever its case, or the path of a
        Hugging Face `config.json` or of a folder with one.

    Raises:
      ValueError: if it is neither, or the file does not describe a known model.
    """
    known = {model.lower(): model for model in PUBLIC_MODELS}
    if name.lower() in known:
        return public_model(known[name.lower()])
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ValueError(
            f"model {name!r} is neither a known name nor a config.json; known names: "
            f"{', '.join(model_names())}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{path}: cannot be read as JSON: {wrong}") from wrong
    try:
        return shape_of_config(config, name=str(path))
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from wrong


def public_model(name: str) -> ModelShape:
    """A packaged model by its exact name."""
    facts = PUBLIC_MODELS[name]
    tables = 1 if facts.get("tied", False) else 2
    return ModelShape(
        name=name,
        layers=build_layers(facts),
        num_embedding_params=tables * facts["vocab"] * facts["hidden"],
        max_context_length=facts["context"],
        note=facts.get("note", ""),
    )


def shape_of_config(config: object, name: str = "config.json") -> ModelShape:
    """The shape of the model that a Hugging Face `config.json` describes.

    Raises:
      ValueError: naming the key that is missing, of the wrong kind, or not known.
    """
    layers, vocab, hidden, tied, context = layers_of_config(config)
    tables = 1 if tied else 2
    return ModelShape(
        name=name,
        layers=layers,
        num_embedding_params=tables * vocab * hidden,
        max_context_length=context,
    )
