"""Random traffic on a tiny hybrid cache, everything checked after every call.

Blocks and slots are simulated as well: each cell of KV and each slot of states holds
the prefix it was computed from, copies are carried out as the cache names them. So a
wrong share, a stale copy or a reused slot is seen as a wrong prefix.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.cache.hybrid import (
    HybridConfig,
    Prompts,
    Step,
    commit,
    empty_cache,
    fork,
    grow,
    lookup,
    release,
    reserve,
)
from oracles.cache import EVICTED, OracleCache
from planner_harness import quick_compile

GARBAGE, ZEROS = -1, -2

TINY = HybridConfig(
    block_size=4,
    num_blocks=26,
    blocks_per_row=6,
    num_rows=6,
    num_snapshots=7,
    num_admitted=3,
    max_commit_blocks=14,
    num_points=2,
    num_ghosts=64,
    num_seen=2**12,
    eviction="lru_paths",
    selection="halving",
)


def _i32(values):
    return jnp.asarray(values, jnp.int32)


@functools.cache
def programs(config):
    """The compiled operations of a configuration; each compiles once."""

    def compiled(function):
        return quick_compile(functools.partial(function, config=config))

    functions = (lookup, reserve, grow, commit, release, fork)
    return {function.__name__: compiled(function) for function in functions}


class Traffic:
    """One random run. `operations` counts rows that something was done to."""

    def __init__(self, config, seed, **limits):
        self.config = config
        self.random = np.random.default_rng(seed)
        self.cache = empty_cache(config, **limits)
        self.run = programs(config)
        self.oracle = OracleCache(
            config.block_size,
            int(self.cache.block_limit),
            int(self.cache.snapshot_limit),
            config.pages_per_snapshot,
        )
        self.exact = config.key_bits == 32
        self.capped = "path_limit" in limits
        self.kv = np.full((config.num_blocks, config.block_size), GARBAGE)
        self.state = np.full(config.num_slots, GARBAGE)
        self.streams = {}  # row -> (root, tokens, prompt length)
        self.prompts = [(-1, 0, [0, 1, 2, 0, 1])]
        self.free_before, self.pinned = self.oracle.num_free(), set()
        self.now = self.operations = self.hits = self.evicted = self.explained = 0

    @property
    def length(self):
        return self.config.blocks_per_row * self.config.block_size

    def step(self):
        """One random call of each kind that makes sense now."""
        idle = [r for r in range(self.config.num_rows) if r not in self.streams]
        choice = self.random.random()
        self.now += int(self.random.integers(1, 60_000))
        if idle and (choice < 0.3 or not self.streams):
            self.admit(idle)
        elif choice < 0.8:
            self.compute()
        elif choice < 0.95 or not idle:
            self.finish()
        else:
            self.fork(idle)

    def _prompt(self):
        """A prompt that starts like an earlier one, more often than not."""
        lora_id, salt, known = self.prompts[self.random.integers(len(self.prompts))]
        kept = int(self.random.integers(0, len(known) + 1))
        more = int(self.random.integers(0 if kept else 1, 9))
        tokens = [*known[:kept], *self.random.integers(0, 3, more).tolist()]
        if self.random.random() < 0.1:
            lora_id, salt = (int(n) for n in self.random.integers(-1, 2, 2))
        return lora_id, salt, tokens[: self.length - 1]

    def admit(self, idle):
        count = self.config.num_admitted
        prompts = [self._prompt() for _ in range(count)]
        reads = self.random.random(count) < 0.95
        rows = self.random.permutation(idle)[:count].tolist()
        rows += [-1] * (count - len(rows))
        tokens = np.zeros((count, self.length), np.int32)
        for at, (_, _, known) in enumerate(prompts):
            tokens[at, : len(known)] = known
        value = Prompts(
            tokens=_i32(tokens),
            length=_i32([len(p[2]) for p in prompts]),
            lora_id=_i32([p[0] for p in prompts]),
            salt=_i32([p[1] for p in prompts]),
            reads=jnp.asarray(reads),
        )
        match = self.run["lookup"](self.cache, value)
        found = jax.device_get(match)
        roots = [self.oracle.trie.root(lora_id, salt) for lora_id, salt, _ in prompts]
        hits = []
        for at, (_, _, known) in enumerate(prompts):
            hit = self.oracle.lookup(roots[at], known, bool(reads[at]))
            hits.append(self._check_hit(found, at, hit, roots[at], known))
        target = [
            int(self.random.integers(len(p[2]), self.length + 1)) for p in prompts
        ]
        expected = self.oracle.grants(
            list(zip(hits, target, (row >= 0 for row in rows), strict=True))
        )
        cache, placed = self.run["reserve"](
            self.cache, _i32(rows), value, match, _i32(target), _i32(self.now)
        )
        placed = jax.device_get(placed)
        assert placed.granted.tolist() == expected
        self.oracle.tick += 1
        need = 0
        for at, row in enumerate(rows):
            if not placed.granted[at]:
                continue
            self.operations += 1
            self.hits += hits[at].cached > 0
            known, total = prompts[at][2], max(target[at], hits[at].cached + 1)
            blocks = -(-total // self.config.block_size)
            need += blocks - len(hits[at].blocks)
            table = np.asarray(cache.rows.block_tables[row])[:blocks].tolist()
            self.oracle.admit(row, roots[at], known, hits[at], table, bool(reads[at]))
            self.oracle.touch_hit(row, hits[at])
            self.pinned |= self.oracle.pins(hits[at])
            self.streams[row] = [roots[at], list(known), prompts[at][:2]]
        self._copy(placed)
        self._settle(cache, need)

    def _check_hit(self, found, at, hit, root, known):
        """The lookup's answer is the oracle's; with weak hashes it may be shorter."""
        cached = int(found.num_cached_tokens[at])
        if self.exact:
            assert cached == hit.cached
            assert found.num_kv_matched_tokens[at] == hit.kv
            assert found.block_ids[at, : len(hit.blocks)].tolist() == hit.blocks
            reason = found.miss_reason[at]
            # What was forgotten for good is no longer known to have been evicted.
            assert reason == hit.reason or (reason == EVICTED and hit.was_there)
            self.explained += reason == EVICTED
            return hit
        assert cached <= hit.cached
        nodes = self.oracle.trie.path(root, known)
        blocks = found.block_ids[at, : cached // self.config.block_size].tolist()
        size = self.config.block_size
        ends = [nodes[(k + 1) * size] for k in range(len(blocks))]
        assert blocks == [self.oracle.published[node] for node in ends]
        assert cached == 0 or nodes[cached] in self.oracle.states
        hit.cached, hit.blocks = cached, blocks
        hit.node = nodes[cached] if cached else None
        return hit

    def _copy(self, placed):
        """Carries out the copies of a reservation: all reads, then all writes."""
        kv, state = self.kv.copy(), self.state.copy()
        for at in range(len(placed.granted)):
            to = placed.block_target[at]
            if to < self.config.num_blocks:
                count = placed.num_copied_tokens[at]
                self.kv[to] = GARBAGE
                self.kv[to, :count] = kv[placed.block_source[at], :count]
            if placed.state_target[at] < self.config.num_slots:
                self.state[placed.state_target[at]] = state[placed.state_source[at]]
            if placed.zero_target[at] < self.config.num_slots:
                self.state[placed.zero_target[at]] = ZEROS

    def compute(self):
        """Some rows run a chunk or a token; then what they did is committed."""
        size, rows = self.config.block_size, self.config.num_rows
        target = np.zeros(rows, np.int32)
        budget = self.config.max_commit_blocks * size - rows * size
        for row in self.random.permutation(list(self.streams)).tolist():
            done = self.oracle.rows[row].num_tokens
            more = int(self.random.integers(0, min(12, budget, self.length - done) + 1))
            target[row] = done + more
            budget -= more
        before = {row: len(r.table) for row, r in self.oracle.rows.items()}
        cache, granted = self.run["grow"](self.cache, _i32(target), _i32(self.now))
        granted = np.asarray(granted)
        self._check_growth(cache, target, granted, before)
        points = np.full((rows, self.config.num_points), -1, np.int32)
        reached = np.zeros(rows, np.int32)
        for row, owner in self.oracle.rows.items():
            reached[row] = owner.num_tokens
            if granted[row] and target[row] > owner.num_tokens:
                self.operations += 1
                points[row] = self._run_row(row, int(target[row]))
                reached[row] = target[row]
        tokens = np.zeros((rows, self.length), np.int32)
        for row, (_, stream, _) in self.streams.items():
            tokens[row, : len(stream)] = stream
        step = Step(
            tokens=_i32(tokens),
            num_tokens=_i32(reached),
            points=_i32(points),
            next_use=_i32([0] * rows),
        )
        cache, filed = self.run["commit"](self.cache, step, _i32(self.now))
        self._check_commit(cache, jax.device_get(filed), points)

    def _run_row(self, row, end):
        """Writes KV and state as a model would; the points whose states are there."""
        owner, (_, stream, _) = self.oracle.rows[row], self.streams[row]
        self._check_row(row)
        while len(stream) < end:
            stream.append(int(self.random.integers(0, 3)))
            owner.nodes.append(
                self.oracle.trie.step(owner.nodes[-1], stream[len(owner.nodes) - 1])
            )
        size, start = self.config.block_size, owner.num_tokens
        for at in range(start, end):
            self.kv[owner.table[at // size], at % size] = owner.nodes[at + 1]
        self.state[row + 1] = owner.nodes[end]
        owner.num_tokens = end
        points = [-1] * self.config.num_points
        if self.random.random() < 0.6:
            points[0] = end
        if self.config.num_points > 1 and self.random.random() < 0.3:
            points[1] = int(self.random.integers(start + 1, end + 1))
        return points

    def _check_row(self, row):
        """The row's KV and state are those of its own tokens, all the way."""
        owner, size = self.oracle.rows[row], self.config.block_size
        done = owner.num_tokens
        cells = [self.kv[owner.table[at // size], at % size] for at in range(done)]
        assert cells == owner.nodes[1 : done + 1]
        assert self.state[row + 1] == (owner.nodes[done] if done else ZEROS)

    def _check_growth(self, cache, target, granted, before):
        size, room = self.config.block_size, self.oracle.num_idle()
        room = min(room, self.config.max_commit_blocks)
        need, stopped = 0, False
        for row in sorted(self.oracle.rows):
            owner = self.oracle.rows[row]
            more = max(-(-int(target[row]) // size) - len(owner.table), 0)
            stopped |= need + more > room
            assert granted[row] == (not stopped)
            if not stopped:
                need += more
                table = np.asarray(cache.rows.block_tables[row])
                owner.table = table[: len(owner.table) + more].tolist()
        if need:
            self.oracle.tick += 1
        self._settle(cache, need)

    def _check_commit(self, cache, filed, points):
        oracle, config = self.oracle, self.config
        oracle.tick += 1
        private = np.asarray(cache.rows.is_private)
        for row in sorted(oracle.rows):
            owner = oracle.rows[row]
            if self.exact:
                assert private[row] == owner.private
            elif private[row] and not owner.private:
                owner.private = True
                size = config.block_size
                done = int(cache.rows.num_indexed[row])
                owner.num_tokens, rest = done * size, owner.num_tokens
                owner.private = False
                oracle.publish(row)
                owner.num_tokens, owner.private = rest, True
            oracle.publish(row)
        asked = {}
        for row in sorted(oracle.rows):
            owner = oracle.rows[row]
            for at, depth in enumerate(points[row].tolist()):
                slot = int(filed.slot[row, at])
                if slot < config.num_slots:
                    assert oracle.can_file(row, depth)
                    assert owner.nodes[depth] not in oracle.states
                    self.state[slot] = owner.nodes[depth]
                    block = owner.table[(depth - 1) // config.block_size]
                    asked[owner.nodes[depth]] = (slot, block)
                if oracle.can_file(row, depth):
                    node = owner.nodes[depth]
                    oracle.ever_filed.add(node)
                    if node in oracle.states:
                        oracle.state_stamp[node] = oracle.tick
        assert len({slot for slot, _ in asked.values()}) == len(asked)
        self._settle(cache, 0, asked)

    def finish(self):
        """Some rows end: finished, cancelled or preempted is all the same."""
        listed = self.random.permutation(list(self.streams))
        listed = listed[: self.random.integers(1, self.config.num_admitted + 1)]
        listed = listed.tolist()
        rows = listed + [-1] * (self.config.num_admitted - len(listed))
        cache = self.run["release"](self.cache, _i32(rows))
        self.oracle.tick += 1
        for row in listed:
            _, stream, (lora_id, salt) = self.streams.pop(row)
            self.prompts = [*self.prompts[-12:], (lora_id, salt, stream)]
            self.oracle.release(row)
            self.operations += 1
        self._settle(cache, 0)

    def fork(self, idle):
        count, size = self.config.num_admitted, self.config.block_size
        running = list(self.streams)
        source = [int(self.random.choice(running)) for _ in range(count)]
        rows = self.random.permutation(idle)[:count].tolist()
        rows += [-1] * (count - len(rows))
        done = [self.oracle.rows[row].num_tokens for row in source]
        total = [min(n + int(self.random.integers(1, 6)), self.length) for n in done]
        new = [
            -(-max(t, n + 1) // size) - n // size
            for t, n in zip(total, done, strict=True)
        ]
        left, expected, need = self.oracle.num_idle(), [], 0
        for at, row in enumerate(rows):
            fits = row >= 0 and done[at] < self.length
            if fits:
                need += new[at]
                fits = need <= left
            expected.append(fits)
        cache, placed = self.run["fork"](
            self.cache, _i32(source), _i32(rows), _i32(total), _i32(self.now)
        )
        placed = jax.device_get(placed)
        assert placed.granted.tolist() == expected
        self.oracle.tick += 1
        need = 0
        for at, row in enumerate(rows):
            if not placed.granted[at]:
                continue
            self.operations += 1
            need += new[at]
            owner = self.oracle.rows[source[at]]
            table = np.asarray(cache.rows.block_tables[row])
            table = table[: done[at] // size + new[at]].tolist()
            assert table[: done[at] // size] == owner.table[: done[at] // size]
            self.oracle.rows[row] = type(owner)(
                list(owner.nodes), owner.num_prompt, table, done[at],
                owner.num_indexed, owner.private,
            )  # fmt: skip
            root, stream, names = self.streams[source[at]]
            self.streams[row] = [root, list(stream), names]
        self._copy(placed)
        self._settle(cache, need)

    def _settle(self, cache, need, filed=None):
        """Takes the cache over after a call and checks all of it."""
        from cache_checks import check_everything

        self.cache = cache
        check_everything(self, jax.device_get(cache), need, filed or {})
        self.free_before = self.oracle.num_free()
        self.pinned = set(self.oracle.refs())
