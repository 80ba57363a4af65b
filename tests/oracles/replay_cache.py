"""The cache of a replay in dictionaries: prefixes by name, blocks and states by hand.

A prefix is whatever `job.path(d)` returns for its first d tokens; two prefixes are the
same exactly if those are equal. Pools may be limited; then the least recently used goes
first, and this oracle says itself which one that is.
"""

import dataclasses

NONE, NO_PREFIX, NO_STATE, NO_KV, EVICTED, FLOORED = (
    *("none", "no_prefix", "no_state"),
    *("no_kv", "evicted", "floored"),
)
ANSWER, CONSUMED, FORK, OTHER = "answer", "consumed answer", "fork", "other"


class Prefixes:
    """Names for the prefixes of token lists: nodes of a trie of single tokens."""

    def __init__(self):
        self._nodes = {}

    def path(self, tokens, lora_id):
        nodes = [self._nodes.setdefault(("root", lora_id), ("root", lora_id))]
        for token in tokens:
            step = (nodes[-1], token)
            nodes.append(self._nodes.setdefault(step, len(self._nodes)))
        return nodes.__getitem__


@dataclasses.dataclass
class Held:
    """What a running job holds."""

    job: object
    prompt: int
    blocks: list
    num_tokens: int
    num_indexed: int
    branch: int
    publishes: bool


@dataclasses.dataclass
class Hit:
    """What the cache has of a prompt, as the report says it."""

    cached: int
    kv: int
    state: int
    reason: str
    seen: int
    branch: int
    ghost: int
    past: object  # the deepest prefix of it with a state, now or once; or None


class CacheBook:
    """Who holds what. The hooks of `oracles.replay.run` come first."""

    def __init__(self, options):
        self.options = options
        self.size = options.block_size
        self.limited = bool(options.kv_blocks or options.state_slots)
        self.grows = bool(
            options.kv_blocks and options.capacity_policy == "max_utilization"
        )
        self.is_closed = False
        self.rows = {}  # cache row -> Held
        self.published = {}  # prefix -> block
        self.states = {}  # prefix -> when it was last passed
        self.hangs = {}  # prefix of a state -> block
        self.depth = {}  # prefix of a state, now or once -> tokens
        self.kinds = {}  # the same -> why it was filed
        self.order = {}  # the same -> the how-manieth it was
        self.once = set()  # prefixes that were ever published
        self.used = {}  # block -> when
        self.number = {}  # block -> its place in its prompt
        self.tick = self.num_blocks_ever = 0
        self.num_evicted_blocks = self.num_evicted_snapshots = 0
        self.num_filed = 0

    def enter(self, job, alone):
        prompt = job.prompt + job.num_resumed
        hit = self._look_up(job, prompt)
        target = prompt
        if not self.grows:
            target = job.prompt + job.output + self.options.draft_tokens
        fits = self._reserve(job, hit, prompt, target)
        if not fits and alone:
            # What a hit pins can be what is missing: then nothing would ever run.
            hit = dataclasses.replace(hit, cached=0, reason=NO_KV)
            fits = self._reserve(job, hit, prompt, target)
        if fits:
            job.cached = hit.cached
            wants = self.options.branch_snapshots and self.options.prefix_caching
            job.learned = tuple(p for p in (hit.branch, hit.ghost) if p and wants)
            self._note(job, hit)
        return fits

    def leave(self, job):
        index = next(index for index, held in self.rows.items() if held.job is job)
        self.tick += 1
        for block in self.rows.pop(index).blocks:
            self.used[block] = self.tick

    def make_space(self, rows):
        lost = []
        while self.grows:
            rows = [pair for pair in rows if pair not in lost]
            wants = {id(job): self._next_room(row) for job, row in rows}
            if not self._is_short(wants):
                break
            self._grow(wants)
            if self._is_short(wants):
                job = rows[-1][0]
                self.leave(job)
                report = job.report
                report["num_preemptions"] = report.get("num_preemptions", 0) + 1
                self.is_closed = True
                lost.append(rows[-1])
        return lost

    def commit(self, rows, landed, passed):
        after = {id(job): at for at, (job, _) in enumerate(rows)}
        points, news = [], 0
        for _, held in sorted(self.rows.items()):
            at = after[id(held.job)]
            row = rows[at][1]
            held.num_tokens = row.num_computed_tokens
            ended = row.phase == "finished" and self.options.answer_snapshots
            own = [(depth, "answer_points") for depth in passed[at]]
            if ended:
                own.append((held.num_tokens, "snapshots"))
            own += [(depth, "snapshots") for depth in landed[at]]
            points += [(held, *point) for point in own]
            if held.publishes:
                news += held.num_tokens // self.size - held.num_indexed
        self.tick += news > 0
        for _, held in sorted(self.rows.items()):
            self._publish(held)
        if points:
            self._file(points)

    def _note(self, job, hit):
        report = job.report
        if "miss_reason" in report:
            lost = max(job.num_computed - hit.cached, 0)
            report["recomputed"] = report.get("recomputed", 0) + lost
            return
        report.update(
            num_cached_tokens=hit.cached,
            num_kv_matched_tokens=hit.kv,
            num_state_matched_tokens=hit.state,
            miss_reason=hit.reason,
            seen=hit.seen,
        )

    def _look_up(self, job, prompt):
        size, path = self.size, job.path
        length = prompt if self.options.prefix_caching else 0
        full = 0
        while (full + 1) * size <= length and path((full + 1) * size) in self.published:
            full += 1
        known = [d for d in range(1, length) if path(d) in self.depth]
        there = [d for d in known if path(d) in self.states and d // size <= full]
        gone = [d for d in known if path(d) not in self.states]
        cached = max(there, default=0)
        kv = max(min(full * size, max(length - 1, 0)), cached)
        once = [k for k in range(1, (length - 1) // size + 1) if self._was(path, k)]
        seen = max([full, *once])
        if kv == 0:
            reason = NO_PREFIX
        elif cached == kv:
            reason = NONE
        else:
            reason = FLOORED if cached else NO_STATE
        if max(gone, default=0) > cached or seen > full:
            reason = EVICTED
        reachable = min(seen * size, max(length - 1, 0))
        past = max(known, default=0)
        kind = self.kinds.get(path(past)) if past else None
        goes_on = kind in (ANSWER, CONSUMED) and 0 <= past - seen * size < size
        parts = cached < seen * size < length and not goes_on
        lost = past in gone and past > cached and kind in (FORK, OTHER)
        return Hit(
            cached=cached,
            kv=kv,
            state=cached,
            reason=reason,
            seen=max(kv, reachable, *gone, 0),
            branch=seen * size if parts else 0,
            ghost=past if lost else 0,
            past=path(past) if past else None,
        )

    def _was(self, path, k):
        return path(k * self.size) in self.once

    def _refs(self):
        return {block for held in self.rows.values() for block in held.blocks}

    def _in_tree(self):
        return {*self.published.values(), *self.hangs.values()}

    def _num_free(self):
        if not self.options.kv_blocks:
            return float("inf")
        return self.options.kv_blocks - len(self._refs() | self._in_tree())

    def _num_idle(self):
        return (self.options.kv_blocks or float("inf")) - len(self._refs())

    def _reserve(self, job, hit, prompt, target):
        size, path = self.size, job.path
        shared = [
            self.published[path((k + 1) * size)] for k in range(hit.cached // size)
        ]
        source = self.hangs[path(hit.cached)] if hit.cached % size else None
        new = -(-max(target, hit.cached + 1) // size) - len(shared)
        pins = {*shared, *([source] if source is not None else [])} - self._refs()
        if new + len(pins) > self._num_idle():
            return False
        self.tick += 1
        for block in (*shared, source):
            self.used[block] = self.tick
        self._use(path, hit)
        index = min(set(range(len(self.rows) + 1)) - set(self.rows))
        publishes = self.options.prefix_caching
        held = Held(job, prompt, shared, hit.cached, len(shared), hit.branch, publishes)
        self.rows[index] = held
        self._take(held, new, keep=source)
        return True

    def _use(self, path, hit):
        if not self.limited:
            return
        for d in range(1, hit.cached + 1):
            if path(d) in self.states:
                self.states[path(d)] = self.tick
        kind = self.kinds.get(hit.past)
        if kind in (ANSWER, CONSUMED):
            self.kinds[hit.past] = CONSUMED if kind == ANSWER else FORK

    def _take(self, held, count, keep=None):
        self._evict_blocks(count - self._num_free(), keep)
        for _ in range(count):
            block = self.num_blocks_ever
            self.num_blocks_ever += 1
            self.used[block], self.number[block] = self.tick, len(held.blocks)
            held.blocks.append(block)

    def _evict_blocks(self, count, keep):
        if count <= 0:
            return
        idle = self._in_tree() - self._refs() - {keep}
        ranked = sorted(idle, key=lambda block: (self.used[block], -self.number[block]))
        gone = set(ranked[:count])
        assert len(gone) == count, "granted more than there is"
        self.published = {p: b for p, b in self.published.items() if b not in gone}
        self._drop_states([p for p, block in self.hangs.items() if block in gone])
        self.num_evicted_blocks += count

    def _drop_states(self, prefixes):
        for prefix in prefixes:
            del self.states[prefix], self.hangs[prefix]
            self.num_evicted_snapshots += 1

    def _next_room(self, row):
        """Tokens that the next step may write; 0 for a row that does not decode."""
        if row.phase != "decode":
            return 0
        return row.num_computed_tokens + 1 + self.options.draft_tokens

    def _lacks(self, held, wants):
        return max(-(-wants.get(id(held.job), 0) // self.size) - len(held.blocks), 0)

    def _is_short(self, wants):
        return any(self._lacks(held, wants) for held in self.rows.values())

    def _grow(self, wants):
        """Rows in the order of their places, each whole, until one does not fit."""
        room, granted = self._num_idle(), []
        for _, held in sorted(self.rows.items()):
            lacks = self._lacks(held, wants)
            if lacks > room:
                break
            room -= lacks
            granted.append((held, lacks))
        self.tick += any(lacks for _, lacks in granted)
        for held, lacks in granted:
            self._take(held, lacks)

    def _publish(self, held):
        while held.publishes and (held.num_indexed + 1) * self.size <= held.num_tokens:
            own = held.blocks[held.num_indexed]
            prefix = held.job.path((held.num_indexed + 1) * self.size)
            block = self.published.setdefault(prefix, own)
            self.once.add(prefix)
            self.used[block] = self.tick
            held.blocks[held.num_indexed] = block
            for state, under in self.hangs.items():
                if under == own:
                    self.hangs[state] = block
            held.num_indexed += 1

    def _file(self, points):
        pending, asked = [], []
        for held, depth, listed in points:
            if not held.publishes or not 0 < depth <= held.num_tokens:
                continue
            prefix = held.job.path(depth)
            asked.append((held, depth, prefix, listed))
            if prefix not in self.states and prefix not in pending:
                pending.append(prefix)
                self.hangs[prefix] = held.blocks[(depth - 1) // self.size]
            if prefix not in self.depth:
                self.depth[prefix] = depth
                self.kinds[prefix] = self._kind(held, depth)
                self.order[prefix] = len(self.order)
        for _, _, prefix, _ in asked:
            self.states[prefix] = self.tick
        short = len(self.states) - (self.options.state_slots or float("inf"))
        if short > 0:
            # Of those that were used at the same time the deeper one goes first.
            ranked = sorted(
                self.states,
                key=lambda prefix: (
                    self.states[prefix],
                    -((self.depth[prefix] - 1) // self.size),
                    self.order[prefix],
                ),
            )
            gone = ranked[:short]
            self._drop_states(gone)
            self.num_evicted_snapshots -= sum(prefix in pending for prefix in gone)
        self.num_filed += sum(prefix in self.states for prefix in pending)
        for held, depth, prefix, listed in asked:
            if prefix in self.states:
                held.job.report.setdefault(listed, set()).add(depth)

    def _kind(self, held, depth):
        if depth > held.prompt:
            return ANSWER
        return FORK if depth == held.branch else OTHER
