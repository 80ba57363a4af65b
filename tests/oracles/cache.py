"""A hybrid cache with real token lists: dictionaries of whole prefixes, no hashes.

Slow and obvious. A prefix is a node of a trie of tokens under a root for each adapter
and salt, so two nodes are equal exactly when all their tokens are. The oracle predicts
hits, grants, publication and adoption. Which of several legal victims go is read from
the cache under test and checked, see `observe_evictions`.
"""

import dataclasses

NONE, NO_PREFIX, NO_STATE, NO_KV, EVICTED, FLOORED = range(6)


class Trie:
    """Interned prefixes: node ids; equal ids mean equal tokens all the way."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.children = {}
        self.depth = []
        self.parent = []
        self.tail = []  # the last block_size nodes up to and with this one

    def _new(self, parent):
        node = len(self.depth)
        self.depth.append(0 if parent is None else self.depth[parent] + 1)
        self.parent.append(parent)
        old = () if parent is None else self.tail[parent]
        self.tail.append((old + (node,))[-self.block_size :])
        return node

    def root(self, lora_id, salt):
        key = (lora_id, salt)
        if key not in self.children:
            self.children[key] = self._new(None)
        return self.children[key]

    def step(self, node, token):
        key = (node, token, "token")
        if key not in self.children:
            self.children[key] = self._new(node)
        return self.children[key]

    def path(self, root, tokens):
        nodes = [root]
        for token in tokens:
            nodes.append(self.step(nodes[-1], token))
        return nodes


@dataclasses.dataclass
class Row:
    """A running request: `nodes[d]` is the prefix of its first d tokens."""

    nodes: list
    num_prompt: int
    table: list
    num_tokens: int
    num_indexed: int
    private: bool


@dataclasses.dataclass
class Hit:
    """What a lookup should say."""

    cached: int
    kv: int
    blocks: list
    node: int | None
    was_there: bool
    reason: int  # if nothing was evicted


class OracleCache:
    """Who holds what, in dictionaries."""

    def __init__(self, block_size, num_blocks, num_snapshots, pages=0):
        self.size = block_size
        self.num_blocks = num_blocks
        self.num_snapshots = num_snapshots
        self.pages = pages
        self.trie = Trie(block_size)
        self.published = {}  # node at the end of a full block -> block id
        self.states = {}  # node -> slot
        self.hangs = {}  # node of a state -> block id
        self.rows = {}
        self.ever_published = set()
        self.ever_filed = set()
        self.block_stamp = {}
        self.state_stamp = {}
        self.tick = 0

    def refs(self):
        """References to each block, counted from the tables."""
        count = {}
        for row in self.rows.values():
            for block in row.table:
                count[block] = count.get(block, 0) + 1
        return count

    def in_tree(self):
        """Blocks that are published or carry a state."""
        return set(self.published.values()) | set(self.hangs.values())

    def num_free(self):
        busy = set(self.refs()) | self.in_tree()
        return self.num_blocks - len(busy) - self.pages * len(self.states)

    def num_idle(self):
        return self.num_blocks - len(self.refs())

    def lookup(self, root, tokens, reads=True):
        """The longest hybrid hit by comparing whole prefixes."""
        nodes = self.trie.path(root, tokens)
        length, size = (len(tokens) if reads else 0), self.size
        full = 0
        while (full + 1) * size <= length and nodes[(full + 1) * size] in (
            self.published
        ):
            full += 1
        depths = [
            d for d in range(1, length) if nodes[d] in self.states and d // size <= full
        ]
        cached = max(depths, default=0)
        kv = max(min(full * size, max(length - 1, 0)), cached)
        deeper = range(cached + 1, length)
        was_there = any(
            nodes[d] in self.ever_filed and nodes[d] not in self.states for d in deeper
        )
        was_there |= any(
            nodes[k * size] in self.ever_published
            for k in range(full + 1, (length - 1) // size + 1)
        )
        if kv == 0:
            reason = NO_PREFIX
        elif cached == kv:
            reason = NONE
        else:
            reason = FLOORED if cached else NO_STATE
        blocks = [self.published[nodes[(k + 1) * size]] for k in range(cached // size)]
        node = nodes[cached] if cached else None
        return Hit(cached, kv, blocks, node, was_there, reason)

    def pins(self, hit):
        """Blocks that a hit needs: those it shares and the one it copies from."""
        pins = set(hit.blocks)
        if hit.node is not None and hit.cached % self.size:
            pins.add(self.hangs[hit.node])
        return pins

    def grants(self, requests):
        """Which of `(hit, num_tokens, wanted)` fit, in order, the first miss stops."""
        refs = self.refs()
        left, pinned, states, granted = self.num_idle(), set(refs), set(), []
        stopped = False
        for hit, num_tokens, wanted in requests:
            if not wanted:
                granted.append(False)
                continue
            pins = self.pins(hit)
            cost = -(-max(num_tokens, hit.cached + 1) // self.size) - len(hit.blocks)
            cost += len(pins - pinned)
            if hit.node is not None and hit.node not in states:
                cost += self.pages
            stopped |= cost > left
            granted.append(not stopped)
            if not stopped:
                left -= cost
                pinned |= pins
                states.add(hit.node)
        return granted

    def admit(self, row, root, tokens, hit, table, reads):
        """A granted request takes its row; `table` is what the cache gave it."""
        nodes = self.trie.path(root, tokens)
        assert table[: len(hit.blocks)] == hit.blocks
        self.rows[row] = Row(
            nodes, len(tokens), list(table), hit.cached, len(hit.blocks), not reads
        )

    def touch_hit(self, row, hit):
        """A hit refreshes its path, the block it copies from, and states up to it."""
        for block in hit.blocks:
            self.block_stamp[block] = self.tick
        if hit.node is not None and hit.cached % self.size:
            self.block_stamp[self.hangs[hit.node]] = self.tick
        for node in self.rows[row].nodes[: hit.cached + 1]:
            if node in self.states:
                self.state_stamp[node] = self.tick

    def publish(self, index):
        """Full blocks of a row become known; twins are adopted. The row's new table."""
        row = self.rows[index]
        while not row.private and (row.num_indexed + 1) * self.size <= row.num_tokens:
            k = row.num_indexed
            node, own = row.nodes[(k + 1) * self.size], row.table[k]
            known = self.published.setdefault(node, own)
            self.ever_published.add(node)
            if known != own:
                row.table[k] = known
                for state, block in self.hangs.items():
                    if block == own:
                        self.hangs[state] = known
            self.block_stamp[known] = self.tick
            row.num_indexed += 1

    def can_file(self, index, depth):
        """Whether a state of the row at this depth may be filed."""
        row = self.rows[index]
        return 0 < depth <= row.num_tokens and not row.private

    def release(self, index):
        row = self.rows.pop(index)
        for block in row.table:
            self.block_stamp[block] = self.tick

    def observe_evictions(self, gone_nodes, gone_states, pinned):
        """Takes out what the cache has evicted, and says what was wrong with it."""
        gone_blocks = {self.published[node] for node in gone_nodes}
        for node in gone_nodes:
            assert self.published[node] not in pinned, "a block that a row holds went"
            del self.published[node]
        for node in list(self.published):
            k = self.trie.depth[node]
            parent = node
            for _ in range(self.size):
                parent = self.trie.parent[parent]
            assert k == self.size or parent in self.published, "a parent went first"
        for node in gone_states:
            del self.states[node]
            del self.hangs[node]
            self.state_stamp.pop(node, None)
        for node, block in self.hangs.items():
            assert block not in gone_blocks, "a state outlived its block"
            d = (self.trie.depth[node] - 1) // self.size * self.size
            parent = node
            while self.trie.depth[parent] > d:
                parent = self.trie.parent[parent]
            assert d == 0 or parent in self.published, "a state without its blocks"
