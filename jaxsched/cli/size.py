"""`python -m jaxsched size`: what a model's cache weighs and what a memory holds.

The model is one of the packaged names or the path of a Hugging Face config.json. All
figures are for one rank. GB is 10**9 bytes.
"""

import argparse
import json

from jaxsched.cache.sizing import (
    DTYPE_BYTES,
    CacheBytes,
    ElementTypes,
    PoolSizes,
    cache_bytes,
    parse_bytes,
    pool_sizes,
)
from jaxsched.cache.sizing_memory import split_layers
from jaxsched.cache.sizing_ranks import effective_block_size, rank_info
from jaxsched.cache.sizing_shapes import find_model, model_names
from jaxsched.cli.reading import InputError
from jaxsched.core.host import check_count


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "size",
        help="size a model's cache for a memory",
        description=__doc__,
        epilog=f"known models: {', '.join(model_names())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="NAME|config.json", help="the model")
    add("--list", action="store_true", help="list the known models and stop")
    add("--memory", default="80GB", help="memory of the device (%(default)s)")
    add(
        "--memory-fraction",
        type=float,
        default=0.9,
        help="part of it for weights and cache; the rest is for activations "
        "(%(default)s)",
    )
    add("--max-num-seqs", type=int, default=256, help="live states (%(default)s)")
    add("--block-size", type=int, default=64, help="tokens (%(default)s)")
    add("--attention-kernel", help="flashmla forces blocks of 64 tokens")
    add("--snapshot-interval", type=int, default=0, help="tokens; 0: none")
    add("--num-snapshots", type=int, help="this many snapshots instead")
    add("--max-context-length", type=int, help="tokens of the longest sequence")
    add("--tensor-parallel", type=int, default=1, metavar="RANKS")
    add("--pipeline-parallel", type=int, default=1, metavar="RANKS")
    add("--pipeline-rank", type=int, default=0, metavar="RANK")
    add("--weight-bytes", help="measured size of the weights, like 63GB")
    types = ElementTypes()
    for field in ("weights", "kv", "state", "conv"):
        add(
            f"--{field}-dtype",
            default=getattr(types, field),
            metavar="TYPE",
            help=f"one of {', '.join(DTYPE_BYTES)} (%(default)s)",
        )
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if args.list:
        print("\n".join(model_names()))
        return 0
    try:
        report = size_report(args)
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong
    if args.json:
        print(json.dumps(report))
    else:
        _print_report(report)
    return 0


def size_report(args: argparse.Namespace) -> dict:
    """All figures of the command as one JSON object.

    Raises:
      ValueError: naming the option, its value and what would be right.
    """
    if args.model is None:
        raise ValueError("--model is missing; --list names the known ones")
    shape = find_model(args.model)
    ranks = split_layers(shape.layers, args.pipeline_parallel)
    rank = check_count("--pipeline-rank", args.pipeline_rank, high=len(ranks) - 1)
    sizes = cache_bytes(
        shape, _types(args), tensor_parallel=args.tensor_parallel, layers=ranks[rank]
    )
    if args.weight_bytes is not None:
        weights = parse_bytes("--weight-bytes", args.weight_bytes)
        sizes = CacheBytes(
            weights=weights, kv_per_token=sizes.kv_per_token, state=sizes.state
        )
    memory = parse_bytes("--memory", args.memory)
    if not 0 < args.memory_fraction <= 1:
        raise ValueError(
            f"--memory-fraction must be in (0, 1], got {args.memory_fraction}"
        )
    usable = int(memory * args.memory_fraction)
    if sizes.weights >= usable:
        raise ValueError(
            f"the weights of {sizes.weights} bytes leave nothing of the {usable} that "
            "may be used: raise --memory or --tensor-parallel, or lower --weights-dtype"
        )
    pools = pool_sizes(
        sizes,
        usable - sizes.weights,
        block_size=effective_block_size(args.block_size, args.attention_kernel),
        num_live_slots=args.max_num_seqs * args.pipeline_parallel + 1,
        snapshot_interval=args.snapshot_interval,
        num_snapshots=args.num_snapshots,
    )
    tensor = args.tensor_parallel
    info = rank_info(
        [-(-layer.num_kv_heads // tensor) for layer in ranks[rank]],
        block_size=pools.block_size,
    )
    context = shape.max_context_length
    if args.max_context_length is not None:
        context = check_count("--max-context-length", args.max_context_length, low=1)
    return {
        "model": shape.name,
        "note": shape.note,
        "num_params": shape.num_params,
        "num_attention_layers": info.num_attention_layers,
        "num_state_layers": sum(layer.has_state for layer in ranks[rank]),
        "num_kv_heads": info.num_kv_heads,
        "memory_bytes": memory,
        "usable_bytes": usable,
        "weight_bytes": sizes.weights,
        "kv_bytes_per_token": sizes.kv_per_token,
        "state_bytes": sizes.state,
        "state_in_kv_tokens": _finite(sizes.state_in_kv_tokens),
        "block_size": pools.block_size,
        "num_blocks": pools.num_blocks,
        "num_tokens": pools.num_tokens,
        "num_live_slots": pools.num_live_slots,
        "num_snapshots": pools.num_snapshots,
        "live_state_bytes": pools.num_live_slots * sizes.state,
        "kv_bytes": pools.num_tokens * sizes.kv_per_token,
        "snapshot_bytes": pools.num_snapshots * sizes.state,
        "unused_bytes": pools.budget - pools.used,
        "max_context_length": context,
        "num_full_contexts": pools.num_tokens // context
        if context and sizes.kv_per_token
        else None,
        "snapshot_costs_blocks": _blocks(sizes, pools),
        "full_context_bytes": context * sizes.kv_per_token + sizes.state,
    }


def _types(args: argparse.Namespace) -> ElementTypes:
    return ElementTypes(
        weights=args.weights_dtype,
        kv=args.kv_dtype,
        state=args.state_dtype,
        conv=args.conv_dtype,
    )


def _finite(value: float) -> float | None:
    return None if value == float("inf") else round(value, 1)


def _blocks(sizes: CacheBytes, pools: PoolSizes) -> int | None:
    block = sizes.kv_per_token * pools.block_size
    return -(-sizes.state // block) if block else None


def _print_report(report: dict) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        box=box.SIMPLE_HEAD, title=_title(report), title_justify="left", show_edge=False
    )
    table.add_column("what")
    for name in ("each", "how many", "together", "of memory"):
        table.add_column(name, justify="right")
    memory = report["memory_bytes"]
    for what, each, count, total in _rows(report):
        share = f"{100 * total / memory:.1f} %"
        table.add_row(what, each, count, _amount(total), share)
    console.print(table)
    for line in _remarks(report):
        console.print(line, highlight=False)


def _title(report: dict) -> str:
    return (
        f"{report['model']}: {_params(report['num_params'])} weights, "
        f"{report['num_attention_layers']} layers with KV, "
        f"{report['num_state_layers']} with a state, {_amount(report['memory_bytes'])}"
    )


def _rows(report: dict):
    state = _amount(report["state_bytes"])
    kv, block = report["kv_bytes_per_token"], report["block_size"]
    yield "weights", "", "", report["weight_bytes"]
    live = f"{report['num_live_slots']:,}"
    yield "live states", state, live, report["live_state_bytes"]
    tokens = f"{report['num_tokens']:,} tokens"
    yield f"KV in blocks of {block}", f"{_amount(kv)}/token", tokens, report["kv_bytes"]
    kept = f"{report['num_snapshots']:,}"
    yield "snapshots", state, kept, report["snapshot_bytes"]
    yield "left over", "", "", report["unused_bytes"]
    rest = report["memory_bytes"] - report["usable_bytes"]
    yield "kept for activations", "", "", rest


def _remarks(report: dict):
    if report["state_bytes"] and report["snapshot_costs_blocks"] is not None:
        yield (
            f"One more snapshot or live state costs {_amount(report['state_bytes'])}: "
            f"{report['snapshot_costs_blocks']:,} blocks, as much as the KV of "
            f"{report['state_in_kv_tokens']:,.0f} tokens."
        )
    if report["state_bytes"] and report["snapshot_costs_blocks"] is None:
        more = report["unused_bytes"] // report["state_bytes"]
        yield (
            f"No layer stores KV: a request costs {_amount(report['state_bytes'])} "
            f"whatever its length, and what is left over holds {more:,} more "
            "snapshots."
        )
    if report["num_full_contexts"] is not None:
        yield (
            f"One request of {report['max_context_length']:,} tokens takes "
            f"{_amount(report['full_context_bytes'])}; KV for "
            f"{report['num_full_contexts']:,} of them fits."
        )
    if report["note"]:
        yield f"Note: {report['note']}."


def _amount(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,} B"


def _params(count: int) -> str:
    for word, scale in (("billion", 10**9), ("million", 10**6)):
        if count >= scale:
            return f"{count / scale:.1f} {word}"
    return f"{count:,}"
