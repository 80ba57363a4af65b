"""`python -m jaxsched generate DIR|tiny`: answers to prompts of token ids.

DIR is a checkpoint folder of a hybrid model (see `verify`); `tiny` is a small built-in
model with generated weights. There is no tokenizer: tokens go in and come out. A line
of --requests is an object with `prompt_tokens` and, where they differ from the options,
`id`, `max_new_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop`,
`snapshot_points` and `priority`. All of them are served together; the same seed gives
the same tokens, whatever else is in the file.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping

from jaxsched.cli import engine_options
from jaxsched.cli.reading import InputError, json_lines
from jaxsched.core.host import check_count, check_counts

_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_FIELDS = (
    *("id", "prompt_tokens", "max_new_tokens", "stop", "snapshot_points", "priority"),
    *_SAMPLING,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request as it was read."""

    where: str
    name: str | int
    prompt: list[int]
    max_new_tokens: int
    options: dict


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts of token ids with a hybrid model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="checkpoint folder, or tiny")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt-tokens", type=_ids, metavar="1,2,3", help="a prompt")
    given.add_argument(
        "--requests", metavar="FILE.jsonl", help="one request a line; -: standard input"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=16, metavar="N")
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0: the likeliest token"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--stop", type=_ids, default=(), metavar="1,2", help="tokens that end an answer"
    )
    engine_options.add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    asked = list(_read(args))
    if not asked:
        raise InputError(f"{args.requests}: no requests")
    longest = max(len(one.prompt) + one.max_new_tokens for one in asked)
    config = engine_options.engine_config(args, longest)
    most = max(len(one.options["stop_tokens"]) for one in asked)
    points = max(len(one.options["snapshot_points"]) for one in asked)
    config = dataclasses.replace(
        config,
        max_stop_tokens=max(config.max_stop_tokens, most),
        max_points=max(config.max_points, points),
    )
    model = engine_options.load_model(args.model, args.dtype)
    engine = engine_options.build_engine(model, config)
    for one in asked:
        try:
            engine.submit(one.prompt, max_new_tokens=one.max_new_tokens, **one.options)
        except ValueError as wrong:
            raise InputError(f"{one.where}: {wrong}") from wrong
    engine.run()
    for one, record in zip(asked, engine.records.values(), strict=True):
        print(_line(one, record, args.json))
    return 0


def _line(one: _Asked, record, as_json: bool) -> str:
    if not as_json:
        tokens = ",".join(str(token) for token in record.output)
        return f"{one.name}: {tokens} ({record.finish_reason})"
    answer = {
        "id": one.name,
        "token_ids": record.output,
        "finish_reason": record.finish_reason,
        "num_prompt_tokens": len(record.prompt),
        "num_cached_tokens": record.num_cached_tokens,
        "num_preemptions": record.num_preemptions,
    }
    return json.dumps(answer)


def _read(args: argparse.Namespace) -> Iterator[_Asked]:
    if args.prompt_tokens is not None:
        yield _asked(args, "--prompt-tokens", {"prompt_tokens": args.prompt_tokens}, 0)
        return
    names = set()
    for number, (where, value) in enumerate(json_lines(args.requests)):
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: must be an object, got {json.dumps(value)}")
        one = _asked(args, where, value, number)
        if one.name in names:
            raise InputError(f"{where}: id {one.name!r} is taken by an earlier line")
        names.add(one.name)
        yield one


def _asked(args: argparse.Namespace, where: str, value: Mapping, number: int) -> _Asked:
    from jaxsched.engine import SamplingParams

    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise InputError(
            f"{where}: unknown field {unknown[0]!r}, the fields are "
            f"{', '.join(_FIELDS)}"
        )
    name = value.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise InputError(f"{where}: id must be a string or an integer, got {name!r}")
    if "prompt_tokens" not in value:
        raise InputError(f"{where}: prompt_tokens is missing")
    stop = value.get("stop", args.stop)
    try:
        return _Asked(
            where=where,
            name=name,
            prompt=check_counts("prompt_tokens", value["prompt_tokens"]),
            max_new_tokens=check_count(
                "max_new_tokens",
                value.get("max_new_tokens", args.max_new_tokens),
                low=1,
            ),
            options={
                "sampling": SamplingParams(
                    **{key: value.get(key, getattr(args, key)) for key in _SAMPLING}
                ),
                "stop_tokens": check_counts("stop", stop),
                "snapshot_points": check_counts(
                    "snapshot_points", value.get("snapshot_points", ())
                ),
                "priority": value.get("priority", 0),
            },
        )
    except ValueError as wrong:
        raise InputError(f"{where}: {wrong}") from wrong


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be token ids with commas between them, got {text!r}"
        ) from None
