"""What must hold of a hybrid cache after every call, against its oracle."""

import numpy as np

from jaxsched.core.config import NO_ID


def check_everything(traffic, tables, need, filed):
    """Evictions were legal, and tables, index and states are the oracle's.

    Args:
      traffic: the run; its oracle has done the call, but for evictions.
      tables: the cache as NumPy arrays.
      need: new blocks that the call handed out.
      filed: node -> (slot, block) of states that the call filed.
    """
    _check_evictions(traffic, tables, need, filed)
    _check_rows(traffic, tables)
    _check_index(traffic, tables)
    _check_states(traffic, tables)


def _check_evictions(traffic, tables, need, filed):
    oracle, config = traffic.oracle, traffic.config
    place = tables.blocks.place
    gone = [node for node, block in oracle.published.items() if place[block] < 0]
    slots = set(tables.states.slot[tables.states.slot > 0].tolist())
    lost = [node for node, slot in oracle.states.items() if slot not in slots]
    # A slot that was given to another state in the same call.
    taken = {slot for slot, _ in filed.values()}
    lost += [n for n, slot in oracle.states.items() if slot in taken and slot in slots]
    traffic.evicted += len(gone) + len(lost)
    if not config.is_shared:
        partial = {oracle.hangs[n] for n in lost} - set(oracle.published.values())
        partial -= traffic.pinned
        evicted = len(gone) + (len(partial) if need else 0)
        assert evicted == max(0, need - traffic.free_before)
        if config.eviction == "lru_paths" and need:
            _check_recency(traffic, gone, partial)
    plain = not config.is_shared and traffic.exact and not traffic.capped
    if config.eviction == "lru_paths" and filed and plain:
        _check_state_recency(oracle, lost)
    before = len(oracle.states)
    oracle.observe_evictions(gone, set(lost), traffic.pinned)
    for node, (slot, block) in filed.items():
        oracle.states[node] = slot
        oracle.hangs[node] = block
        oracle.ever_filed.add(node)
        oracle.state_stamp[node] = oracle.tick
    if filed and plain:
        limit = oracle.num_snapshots
        assert len(oracle.states) == min(before + len(filed), limit)


def _check_recency(traffic, gone, partial):
    """No block stayed that was used longer ago, or as long ago and deeper."""
    oracle, refs = traffic.oracle, traffic.pinned
    size, depth = oracle.size, oracle.trie.depth

    def key(node, block):
        number = (depth[node] - 1) // size
        return (oracle.block_stamp[block], -number)

    went = {oracle.published[node] for node in gone} | partial
    items = [(node, block) for node, block in oracle.published.items()]
    items += [(n, b) for n, b in oracle.hangs.items() if b not in refs]
    left = [key(n, b) for n, b in items if b not in refs and b not in went]
    taken = [key(n, b) for n, b in items if b in went]
    assert not taken or not left or max(taken) <= min(left)


def _check_state_recency(oracle, lost):
    stamp = oracle.state_stamp
    left = [stamp[n] for n in oracle.states if n not in lost]
    assert not lost or not left or max(stamp[n] for n in lost) <= min(left)


def _check_rows(traffic, tables):
    oracle, rows = traffic.oracle, tables.rows
    assert np.flatnonzero(rows.is_used).tolist() == sorted(oracle.rows)
    width = rows.block_tables.shape[1]
    for index, row in oracle.rows.items():
        padding = [traffic.config.num_blocks] * (width - len(row.table))
        assert rows.block_tables[index].tolist() == row.table + padding
        assert rows.num_blocks[index] == len(row.table)
        assert rows.num_tokens[index] == row.num_tokens
        assert rows.num_indexed[index] == row.num_indexed
        assert len(set(row.table)) == len(row.table)
    refs = np.zeros(traffic.config.num_blocks, int)
    for block, count in oracle.refs().items():
        refs[block] = count
    assert tables.blocks.num_refs.tolist() == refs.tolist()
    size = traffic.config.block_size
    for row in oracle.rows.values():  # what a row may still write is its own
        assert all(refs[b] == 1 for b in row.table[row.num_tokens // size :])
    for index in oracle.rows:
        traffic._check_row(index)


def _check_index(traffic, tables):
    oracle, blocks = traffic.oracle, tables.blocks
    known = np.flatnonzero(blocks.place >= 0)
    assert sorted(oracle.published.values()) == known.tolist()
    assert tables.index.block[blocks.place[known]].tolist() == known.tolist()
    assert np.sum(tables.index.block >= 0) == len(known)
    assert (tables.index.fingerprint[blocks.place[known]] == blocks.key[1, known]).all()
    trie, size = oracle.trie, traffic.config.block_size
    cells = traffic.kv
    for node, block in oracle.published.items():
        assert tuple(cells[block]) == trie.tail[node]
        parent = trie.parent[trie.tail[node][0]]
        want = oracle.published[parent] if trie.depth[node] > size else NO_ID
        assert blocks.parent[block] == want
        assert blocks.number[block] == trie.depth[node] // size - 1


def _check_states(traffic, tables):
    oracle, states = traffic.oracle, tables.states
    there = np.flatnonzero(states.slot > 0)
    slots = states.slot[there].tolist()
    config = traffic.config
    assert len(set(slots)) == len(slots) <= oracle.num_snapshots
    assert all(1 + config.num_rows <= slot < config.num_slots for slot in slots)
    by_slot = {slot: node for node, slot in oracle.states.items()}
    assert sorted(by_slot) == sorted(slots)
    for entry, slot in zip(there.tolist(), slots, strict=True):
        node = by_slot[slot]
        depth = oracle.trie.depth[node]
        assert states.depth[entry] == depth
        assert traffic.state[slot] == node
        assert states.block[entry] == oracle.hangs[node]
        last = (depth - 1) % config.block_size
        tail = traffic.oracle.trie.tail[node][-(last + 1) :]
        assert tuple(traffic.kv[oracle.hangs[node], : last + 1]) == tail
    if config.is_shared:
        _check_pages(traffic, tables, slots)


def _check_pages(traffic, tables, slots):
    pages = traffic.config.pages_per_snapshot
    owner = tables.blocks.state_slot
    for slot in slots:
        mine = np.flatnonzero(owner == slot).tolist()
        assert len(mine) == pages
        assert sorted(tables.slot_pages[slot].tolist()) == mine
    assert np.sum(owner > 0) == pages * len(slots)
    held = set(traffic.oracle.refs()) | traffic.oracle.in_tree()
    assert not held & set(np.flatnonzero(owner > 0).tolist())
