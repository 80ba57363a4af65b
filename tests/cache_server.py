"""One request after another on a hybrid cache, as a server without a model would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.cache.hybrid import (
    HybridConfig,
    MissReason,
    Prompts,
    Step,
    commit,
    empty_cache,
    lookup,
    release,
    reserve,
)
from jaxsched.core.config import NO_ID
from planner_harness import quick_compile

CONFIG = HybridConfig(
    block_size=16,
    num_blocks=1600,
    blocks_per_row=760,
    num_rows=2,
    num_snapshots=120,
    num_admitted=2,
    max_commit_blocks=760,
    num_points=14,
    num_ghosts=64,
    num_seen=2**14,
    eviction="lru_paths",
    selection="halving",
)


@functools.cache
def _programs(config):
    functions = (lookup, reserve, commit, release)
    return {
        function.__name__: quick_compile(functools.partial(function, config=config))
        for function in functions
    }


def segment(name, length):
    """A named run of tokens: the same name gives the same tokens from its start."""
    seed = int.from_bytes(name.encode()[:4].ljust(4, b"."), "big") % 2**31
    return ((np.arange(length) * 2654435761 + seed * 40503) % 2**31).tolist()


def _i32(values):
    return jnp.asarray(values, jnp.int32)


class Server:
    """Two rows; prompts are token lists."""

    def __init__(self, config=CONFIG, **limits):
        self.config = config
        self.run = _programs(config)
        self.cache = empty_cache(config, **limits)
        self.tokens = np.zeros((config.num_rows, self.width), np.int32)
        self.now = 0

    @property
    def width(self):
        return self.config.blocks_per_row * self.config.block_size

    def prompts(self, tokens, lora_id=NO_ID, salt=0, reads=True):
        """One list, or several, as `Prompts`."""
        lists = tokens if tokens and isinstance(tokens[0], list) else [tokens]
        count = self.config.num_admitted
        table = np.zeros((count, self.width), np.int32)
        for at, one in enumerate(lists):
            table[at, : len(one)] = one
        lengths = [len(one) for one in lists] + [0] * (count - len(lists))
        return Prompts(
            tokens=_i32(table),
            length=_i32(lengths),
            lora_id=_i32([lora_id] * count),
            salt=_i32([salt] * count),
            reads=jnp.asarray([reads] * count),
        )

    def lookup(self, tokens, **names):
        """What would be reused: (cached, kv, reason, branch point)."""
        match = jax.device_get(
            self.run["lookup"](self.cache, self.prompts(tokens, **names))
        )
        return (
            int(match.num_cached_tokens[0]),
            int(match.num_kv_matched_tokens[0]),
            MissReason(int(match.miss_reason[0])),
            int(match.branch_point[0]),
        )

    def reserve(self, tokens, rows, target=None, **names):
        """Admits into rows; the granted mask and what each starts from."""
        prompts = self.prompts(tokens, **names)
        match = self.run["lookup"](self.cache, prompts)
        rows = list(rows) + [NO_ID] * (self.config.num_admitted - len(rows))
        target = prompts.length if target is None else _i32([target] * len(rows))
        self.now += 1000
        self.cache, placed = self.run["reserve"](
            self.cache, _i32(rows), prompts, match, target, _i32(self.now)
        )
        for at, row in enumerate(rows):
            if row >= 0:
                self.tokens[row] = prompts.tokens[at]
        return jax.device_get(placed)

    def commit(self, reached, points):
        """What rows have computed, and the points whose states are there."""
        rows = self.config.num_rows
        table = np.full((rows, self.config.num_points), NO_ID, np.int32)
        done = np.zeros(rows, np.int32)
        for row, end in reached.items():
            done[row] = end
            table[row, : len(points[row])] = points[row]
        step = Step(
            tokens=_i32(self.tokens),
            num_tokens=_i32(done),
            points=_i32(table),
            next_use=_i32([0] * rows),
        )
        self.cache, filed = self.run["commit"](self.cache, step, _i32(self.now))
        return jax.device_get(filed)

    def release(self, *rows):
        listed = list(rows) + [NO_ID] * (self.config.num_admitted - len(rows))
        self.cache = self.run["release"](self.cache, _i32(listed))

    def serve(self, prompt, answer=(), points=(), branch=False, interval=0, **names):
        """A whole request; its points are filed as its prefill passes them.

        Returns tokens reused.
        """
        fork_at = self.lookup(prompt, **names)[3] if branch else 0
        total = len(prompt) + len(answer)
        placed = self.reserve(prompt, [0], target=total, **names)
        assert placed.granted[0]
        cached = int(placed.num_cached_tokens[0])
        self.tokens[0, len(prompt) : total] = list(answer)
        every = range(interval, len(prompt) + 1, interval) if interval else ()
        wanted = sorted({*points, *every, *([fork_at] if fork_at else [])})
        wanted = [point for point in wanted if point > cached]
        for at in range(0, max(len(wanted), 1), self.config.num_points):
            self.commit({0: total}, {0: wanted[at : at + self.config.num_points]})
        self.release(0)
        return cached

    def depths(self):
        """Depths of the snapshots that are there, ascending."""
        states = jax.device_get(self.cache.states)
        return sorted(states.depth[states.slot > 0].tolist())
