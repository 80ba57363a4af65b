"""Which eviction policy reuses most of a trace: one request after another, one arena.

    python -m benchmarks.eviction TRACE_links.csv --budget-gb 40 --kv-bytes 65536
        --state-bytes 26800000 --policy reuse_density --policy lru_paths

Requests run one by one on the trace's clock through the real tables: lookup, reserve,
commit with the points that the cache asks for, release. No model runs; the state at
every point is taken to be there. Prints the share of prompt tokens reused.
"""

import argparse
import csv
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.cache.allocation import make_room
from jaxsched.cache.hybrid import (
    HybridConfig,
    Prompts,
    Step,
    commit,
    empty_cache,
    lookup,
    release,
    reserve,
)
from jaxsched.core.config import NO_ID


def read_links(path: str, limit: int | None = None) -> list[dict]:
    """Requests of a links file: times in ms, lengths, parent and shared tokens."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))[:limit]
    return [
        {
            "time": round(float(row["timestamp_s"]) * 1000),
            "prompt": int(row["input_len"]),
            "output": int(row["output_len"]),
            "parent": int(row["parent"]),
            "shared": int(row["shared_len"]),
        }
        for row in rows
    ]


def token_runs(requests: list[dict]) -> list[list[tuple[int, int, int]]]:
    """Each request's prompt and answer as runs (owner, start, end) of owned tokens."""
    runs = []
    for index, request in enumerate(requests):
        own, left = [], request["shared"] if request["parent"] >= 0 else 0
        left = min(left, request["prompt"])
        if left:
            for owner, start, end in runs[request["parent"]]:
                if left <= 0:
                    break
                own.append((owner, start, min(end, start + left)))
                left -= end - start
        done = sum(end - start for _, start, end in own)
        own.append((index, done, request["prompt"] + request["output"]))
        runs.append(own)
    return runs


def tokens_of(runs: list[tuple[int, int, int]], length: int) -> np.ndarray:
    """Token ids that are equal exactly where owner and position are (to 31 bits)."""
    tokens = np.zeros(length, np.int64)
    for owner, start, end in runs:
        at = np.arange(start, end, dtype=np.int64)
        tokens[start:end] = ((owner + 1) * 1_000_003 + at * 7919) & 0x7FFFFFFF
    return tokens.astype(np.int32)


def next_uses(requests: list[dict]) -> list[int]:
    """When the end of each request's answer is used next, ms; 0: never."""
    uses = [0] * len(requests)
    for request in requests:
        at = request["parent"]
        if at < 0 or uses[at]:
            continue
        whole = requests[at]["prompt"] + requests[at]["output"]
        if request["shared"] >= whole:
            uses[at] = request["time"]
    return uses


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def serve(cache, tokens, prompt, total, now, next_use, interval, room, config):
    """One request from arrival to release; tokens reused, and the cache.

    Afterwards `room` blocks are made free again: what a running request needs is not
    charged to the budget, and what it leaves behind competes with all the rest.
    """
    prompts = Prompts(
        tokens=tokens[None, :],
        length=prompt[None],
        lora_id=jnp.full(1, NO_ID, jnp.int32),
        salt=jnp.zeros(1, jnp.int32),
        reads=jnp.ones(1, bool),
    )
    row = jnp.zeros(1, jnp.int32)
    match = lookup(cache, prompts, config)
    cache, placed = reserve(cache, row, prompts, match, total[None], now, config)
    cached = placed.num_cached_tokens[0]
    count = config.num_points - 3
    grid = (cached // jnp.maximum(interval, 1) + 1) * interval
    grid = grid + interval * jnp.arange(count, dtype=jnp.int32)
    grid = jnp.where((interval > 0) & (grid <= prompt), grid, NO_ID)
    asked = jnp.stack([match.branch_point[0], match.ghost_point[0], total])
    points = jnp.concatenate([jnp.where(asked > cached, asked, NO_ID), grid])
    step = Step(
        tokens=tokens[None, :],
        num_tokens=jnp.where(placed.granted, total, 0),
        points=points[None, :],
        next_use=next_use[None],
    )
    cache, _ = commit(cache, step, now, config)
    cache = release(cache, row, config)
    none = jnp.zeros(config.num_blocks, bool)
    free = jnp.zeros(config.num_entries, bool)
    cache = make_room(cache, room, none, free, now, config)
    return cache, cached, match.num_kv_matched_tokens[0]


def blocks_of(budget_gb: float, args) -> int:
    """Pages that a budget holds."""
    return int(budget_gb * 1e9 / (args.kv_bytes * args.block_size))


def room_of(requests: list[dict], args) -> int:
    """Blocks that the longest request and its snapshots need while it runs."""
    if args.charge_running:
        return 0
    longest = max(r["prompt"] + r["output"] for r in requests)
    pages = -(-args.state_bytes // (args.kv_bytes * args.block_size))
    points = 3 + (-(-longest // args.interval) if args.interval else 0)
    return -(-longest // args.block_size) + points * pages


def make_config(requests: list[dict], args, policy: str) -> HybridConfig:
    """A shared arena of the byte budget; pages of whole blocks."""
    longest = max(r["prompt"] + r["output"] for r in requests)
    width = -(-longest // args.block_size)
    num_blocks = blocks_of(max(args.budget_gb), args) + room_of(requests, args)
    pages = -(-args.state_bytes // (args.kv_bytes * args.block_size))
    points = 3 + (-(-longest // args.interval) if args.interval else 0)
    ghosts = args.ghosts
    return HybridConfig(
        block_size=args.block_size,
        num_blocks=num_blocks,
        blocks_per_row=width,
        num_rows=1,
        num_snapshots=num_blocks // pages,
        num_admitted=1,
        max_commit_blocks=width,
        num_points=points,
        pages_per_snapshot=pages,
        state_tokens=args.state_bytes // args.kv_bytes,
        num_ghosts=ghosts,
        num_seen=2**18,
        eviction=policy,
        selection="halving",
    )


def run_trace(
    requests: list[dict],
    config: HybridConfig,
    interval: int,
    num_blocks: int,
    room: int,
) -> dict:
    """Serves all requests in order with so many blocks; what was reused."""
    runs, uses = token_runs(requests), next_uses(requests)
    cache = empty_cache(config, num_blocks=num_blocks + room)
    length = config.blocks_per_row * config.block_size
    start, hits, kv = time.perf_counter(), [], []
    for at, request in enumerate(requests):
        tokens = tokens_of(runs[at], length)
        cache, cached, matched = serve(
            cache,
            jnp.asarray(tokens),
            jnp.int32(request["prompt"]),
            jnp.int32(request["prompt"] + request["output"]),
            jnp.int32(request["time"]),
            jnp.int32(uses[at]),
            jnp.int32(interval),
            jnp.int32(room),
            config,
        )
        hits.append(cached)
        kv.append(matched)
    prompts = sum(r["prompt"] for r in requests)
    return {
        "token_hit_percent": round(
            100 * int(np.sum(jax.device_get(hits))) / prompts, 2
        ),
        "kv_hit_percent": round(100 * int(np.sum(jax.device_get(kv))) / prompts, 2),
        "num_states": int(jnp.sum(cache.states.resident.astype(jnp.int32))),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Runs the named policies on one trace and one budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--budget-gb", type=float, action="append", required=True)
    parser.add_argument("--kv-bytes", type=int, default=65536)
    parser.add_argument("--state-bytes", type=int, default=26_800_000)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--interval", type=int, default=0)
    parser.add_argument("--ghosts", type=int, default=2048)
    parser.add_argument("--charge-running", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--policy", action="append")
    args = parser.parse_args()
    requests = read_links(args.trace, args.limit)
    for policy in args.policy or ["lru_paths", "reuse_density"]:
        config = make_config(requests, args, policy)
        for budget in args.budget_gb:
            blocks = blocks_of(budget, args)
            result = run_trace(
                requests, config, args.interval, blocks, room_of(requests, args)
            )
            print(json.dumps({"policy": policy, "gb": budget, **result}), flush=True)


if __name__ == "__main__":
    main()
