"""Options of the commands that serve a model, and the engine that they stand for."""

import argparse
import dataclasses

from jaxsched.cli.reading import InputError
from jaxsched.core.config import SnapshotMode

TINY = "tiny"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The fields of `EngineConfig` that a user sets, and the weights' dtype."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights"
    )
    for name, text in (
        ("--block-size", "tokens of a KV block"),
        ("--max-num-seqs", "requests that run at a time"),
        ("--max-num-batched-tokens", "tokens of a step"),
        ("--max-model-len", "tokens of a request; default: the longest one's"),
        ("--kv-blocks", "blocks of the pool; 0: what all rows need"),
        ("--state-slots", "snapshots kept at a time"),
        ("--decode-steps", "decode steps of one call"),
        ("--snapshot-interval", "tokens between snapshots; 0: none"),
    ):
        group.add_argument(name, type=int, metavar="N", help=text)
    group.add_argument("--snapshot-mode", choices=[str(name) for name in SnapshotMode])
    for name, text in (
        ("--prefix-caching", "reuse prefixes (on)"),
        (
            "--answer-snapshots",
            "keep answers too, for next turns; tokens then agree with those without "
            "reuse within rounding, not exactly (off)",
        ),
    ):
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=text)


_RENAMED = {"kv_blocks": "num_blocks", "state_slots": "num_snapshots"}


def engine_config(args: argparse.Namespace, longest: int):
    """The `EngineConfig` of options; its own defaults where none is given.

    Args:
      args: parsed options.
      longest: tokens of the longest request, prompt and answer.

    Raises:
      InputError: naming the field and the value.
    """
    from jaxsched.engine import EngineConfig

    given = {"max_model_len": max(longest, 2)}
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in vars(args).items():
        name = _RENAMED.get(name, name)
        if name in names and value is not None:
            given[name] = value
    try:
        return EngineConfig(**given)
    except ValueError as wrong:
        text = str(wrong)
        for option, field in _RENAMED.items():
            text = text.replace(field, option)
        raise InputError(text) from wrong


def load_model(name: str, dtype: str):
    """The built-in small model, or a checkpoint folder, as a `ServedModel`.

    Raises:
      InputError: if the folder cannot be loaded.
    """
    from jaxsched.models.serving import ServedModel
    from jaxsched.models.tiny import tiny_model

    if name == TINY:
        return tiny_model(dtype=dtype)
    try:
        return ServedModel.load(name, dtype=dtype)
    except (ValueError, OSError) as wrong:
        raise InputError(str(wrong)) from wrong


def build_engine(model, config):
    """An engine that serves a `ServedModel`.

    Raises:
      InputError: if the model has no recurrent layers.
    """
    from jaxsched.engine import Engine
    from jaxsched.models.engine_step import engine_step

    try:
        return Engine(engine_step(model, config), config)
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong
