"""Match, reserve, commit for a queue of prompts, against plain Python dictionaries.

    python -m benchmarks.cache_ops [--quick]

64 requests with prompts of 8,192 tokens, the first half of each cached with a state,
blocks of 64, 20,000 blocks, 512 snapshots; and one prompt of 131,072 tokens at block
sizes 16 and 64. The rival does the same work the usual way: a hash of each block's
tokens chained on its parent's, one dictionary, an LRU list. Needs a CPU.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
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


class DictCache:
    """What a host-side prefix cache does: dictionaries and an LRU of free blocks."""

    def __init__(self, num_blocks: int, block_size: int):
        self.size = block_size
        self.free = collections.OrderedDict((b, None) for b in range(num_blocks))
        self.blocks: dict = {}
        self.key_of: dict = {}
        self.states: dict = {}
        self.refs = [0] * num_blocks

    def keys(self, tokens: list) -> list:
        """A chained key of each full block."""
        key, out = None, []
        for start in range(0, len(tokens) - self.size + 1, self.size):
            key = hash((key, tuple(tokens[start : start + self.size])))
            out.append(key)
        return out

    def match(self, tokens: list, keys: list) -> tuple[list, int]:
        """Blocks and the deepest state on them, tokens compared."""
        found, state = [], 0
        for at, key in enumerate(keys):
            known = self.blocks.get(key)
            part = tuple(tokens[at * self.size : (at + 1) * self.size])
            if known is None or known[1] != part:
                break
            found.append(known[0])
            if key in self.states:
                state = at + 1
        return found[:state], state

    def reserve(self, shared: list, count: int) -> list:
        """References to the shared blocks and new ones, the least recently used."""
        for block in shared:
            self.refs[block] += 1
            self.free.pop(block, None)
        new = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            old = self.key_of.pop(block, None)
            if old is not None:
                self.blocks.pop(old, None)
                self.states.pop(old, None)
            self.refs[block] = 1
            new.append(block)
        return shared + new

    def commit(self, table: list, keys: list, tokens: list, start: int, end: int):
        """Publishes blocks of one request."""
        for at in range(start, end):
            part = tuple(tokens[at * self.size : (at + 1) * self.size])
            if keys[at] not in self.blocks:
                self.blocks[keys[at]] = (table[at], part)
                self.key_of[table[at]] = keys[at]

    def release(self, table: list):
        """Idle blocks go to the end of the LRU list."""
        for block in table:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None


def _i32(values):
    return jnp.asarray(values, jnp.int32)


def _prompts(tokens: np.ndarray) -> Prompts:
    count, length = tokens.shape
    return Prompts(
        tokens=_i32(tokens),
        length=_i32([length] * count),
        lora_id=_i32([NO_ID] * count),
        salt=_i32([0] * count),
        reads=jnp.ones(count, bool),
    )


def _filled(config: HybridConfig, tokens: np.ndarray, depth: int):
    """A cache that holds the first `depth` tokens of each prompt, and their states."""
    rows = config.num_rows
    cache = empty_cache(config)
    each = config.max_commit_blocks * config.block_size // depth
    row = jnp.arange(rows, dtype=jnp.int32)
    start = _prompts(tokens[:, :depth])
    width = config.blocks_per_row * config.block_size
    padded = np.zeros((rows, width), np.int32)
    padded[:, : tokens.shape[1]] = tokens
    start = Prompts(**{**vars(start), "tokens": _i32(padded)})
    match = jax.jit(functools.partial(lookup, config=config))(cache, start)
    cache, _ = jax.jit(functools.partial(reserve, config=config))(
        cache, row, start, match, start.length, _i32(0)
    )
    run = jax.jit(functools.partial(commit, config=config))
    done = np.zeros(rows, np.int32)
    for at in range(0, rows, each):
        done[at : at + each] = depth
        points = np.full((rows, config.num_points), NO_ID, np.int32)
        points[at : at + each, 0] = depth
        step = Step(
            tokens=_i32(padded),
            num_tokens=_i32(done),
            points=_i32(points),
            next_use=_i32([0] * rows),
        )
        cache, _ = run(cache, step, _i32(0))
    return release(cache, row, config), padded


def _config(args, **sizes) -> HybridConfig:
    choices = {
        "block_size": 64,
        "num_blocks": 2_000 if args.quick else 20_000,
        "num_snapshots": 512,
        "num_ghosts": 64,
        "eviction": "lru_paths",
        "selection": "halving",
    }
    return HybridConfig(**{**choices, **sizes})


def main(args) -> dict:
    """Both measurements; microseconds."""
    return {"queue": _queue(args), "long_prompt": _long(args)}


def _queue(args) -> dict:
    count, length = (8, 1024) if args.quick else (64, 8192)
    config = _config(
        args,
        blocks_per_row=length // 64 + 8,
        num_rows=count,
        num_admitted=count,
        max_commit_blocks=count + (2048 if args.quick else 8192) // 64,
    )
    tokens = np.random.default_rng(0).integers(0, 50_000, (count, length))
    tokens = tokens.astype(np.int32)
    cache, padded = _filled(config, tokens, length // 2)
    prompts = Prompts(**{**vars(_prompts(tokens)), "tokens": _i32(padded)})
    row = jnp.arange(count, dtype=jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache):
        match = lookup(cache, prompts, config)
        cache, placed = reserve(
            cache, row, prompts, match, prompts.length, _i32(0), config
        )
        # One step of the budget: two blocks of every prompt are computed.
        reached = placed.num_cached_tokens + 128
        cache, _ = commit(
            cache,
            Step(
                tokens=prompts.tokens,
                num_tokens=reached,
                points=reached[:, None],
                next_use=jnp.zeros_like(reached),
            ),
            _i32(0),
            config,
        )
        return cache, match.num_cached_tokens

    keep = jax.tree.map(jnp.copy, cache)

    def tables():
        # The same start in every round; the copy is part of the time.
        _, cached = step(jax.tree.map(jnp.copy, keep))
        return cached

    assert int(jnp.min(tables())) == length // 2
    match_only = jax.jit(functools.partial(lookup, config=config))
    lists = tokens.tolist()
    figures = harness.measure(
        {
            "tables: match + reserve + commit": tables,
            "tables: match": lambda: match_only(keep, prompts),
            "dictionaries: match + reserve + commit": functools.partial(
                _with_dicts, config, lists, length
            ),
        },
        rounds=20,
        seconds=20.0,
    )
    _print("64 prompts of 8,192 tokens", figures)
    return figures


def _with_dicts(config: HybridConfig, lists: list, length: int) -> None:
    """The same on a dictionary cache; filling it beforehand is not timed."""
    cache = _dict_cache(config.num_blocks, config.block_size, length, lists)
    half = length // 2 // config.block_size
    tables = []
    for tokens in lists:
        keys = cache.keys(tokens)
        shared, state = cache.match(tokens, keys)
        table = cache.reserve(shared, length // config.block_size - state)
        cache.commit(table, keys, tokens, half, half + 2)
        cache.states[keys[half + 1]] = True
        tables.append(table)
    for tokens, table in zip(lists, tables, strict=True):
        keys = None
        cache.release(table)
        del keys, tokens


_DICTS: dict = {}


def _dict_cache(num_blocks: int, block_size: int, length: int, lists: list):
    """One filled dictionary cache a size; rounds leave it filled."""
    known = _DICTS.get((num_blocks, length))
    if known is None:
        known = DictCache(num_blocks, block_size)
        for tokens in lists:
            keys = known.keys(tokens[: length // 2])
            table = known.reserve([], len(keys))
            known.commit(table, keys, tokens, 0, len(keys))
            known.states[keys[-1]] = True
            known.release(table)
        _DICTS[(num_blocks, length)] = known
    return known


def _long(args) -> dict:
    length, results = (8_192 if args.quick else 131_072), {}
    for size in (16, 64):
        config = _config(
            args,
            block_size=size,
            num_blocks=20_000,
            blocks_per_row=length // size + 1,
            num_rows=1,
            num_admitted=1,
            max_commit_blocks=length // size,
        )
        tokens = np.random.default_rng(1).integers(0, 50_000, (1, length))
        tokens = tokens.astype(np.int32)
        cache, padded = _filled(config, tokens, length)
        prompts = Prompts(**{**vars(_prompts(tokens)), "tokens": _i32(padded)})
        match = jax.jit(functools.partial(lookup, config=config))
        lists = tokens.tolist()
        dicts = DictCache(20_000, size)
        keys = dicts.keys(lists[0])
        dicts.commit(dicts.reserve([], len(keys)), keys, lists[0], 0, len(keys))
        found = match(cache, prompts)
        assert int(found.num_kv_matched_tokens[0]) == length - 1
        figures = harness.measure(
            {
                "tables": functools.partial(match, cache, prompts),
                "dictionaries": lambda c=dicts, t=lists[0]: c.match(t, c.keys(t)),
            },
            rounds=30,
        )
        _print(f"one prompt of {length:,} tokens, blocks of {size}", figures)
        results[str(size)] = figures
    return results


def _print(title: str, figures: dict) -> None:
    rows = [
        [name, f"{f['min_us']:,.0f}", f"{f['median_us']:,.0f}"]
        for name, f in figures.items()
    ]
    harness.print_table(title, ["", "min us", "median us"], rows)


if __name__ == "__main__":
    harness.run(__doc__.splitlines()[0], main)
