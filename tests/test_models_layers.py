"""Each layer's function is the token-by-token rule, at any cut and any odd size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models.config import MlpConfig, MoeConfig
from jaxsched.models.conv import Cut, convolve, merge_carried, rows_to_store
from jaxsched.models.moe import experts_dense, experts_ragged, route
from jaxsched.models.paged_attention import page_slots, paged_attention
from jaxsched.models.primitives import gated_norm, rotate
from jaxsched.models.ssd import scan_cells, step_rows
from oracles import models as oracle

# Compiled whole: op by op, each small operation would be compiled by itself.
scan_cells, step_rows, convolve, merge_carried, page_slots, rotate = (
    jax.jit(function, static_argnames=names)
    for function, names in (
        (scan_cells, ()),
        (step_rows, ()),
        (convolve, ()),
        (merge_carried, ()),
        (page_slots, ("page_size", "num_pages")),
        (rotate, ("dim", "theta", "scaling")),
    )
)
rows_to_store = jax.jit(rows_to_store, static_argnames="size")
paged_attention = jax.jit(paged_attention, static_argnames=("layer", "scale"))
gated_norm = jax.jit(gated_norm, static_argnames=("gate", "groups", "eps"))
route = jax.jit(route, static_argnames="moe")

TIGHT = dict(rtol=2e-5, atol=2e-5)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scan_inputs(length, groups, per_group, dim, size):
    heads = groups * per_group
    return dict(
        x=normal(1, length, heads, dim),
        dt=np.abs(normal(2, length, heads)) * 0.3,
        rates=-np.abs(normal(3, heads)) - 0.1,
        keys=normal(4, length, groups, size),
        queries=normal(5, length, groups, size),
    )


def in_cells(values, chunk, cells):
    padded = np.zeros((cells * chunk, *values.shape[1:]), np.float32)
    padded[: len(values)] = values
    return jnp.asarray(padded.reshape(cells, chunk, *values.shape[1:]))


@pytest.mark.parametrize(
    "chunk, groups, per_group, dim, size", [(8, 2, 2, 4, 8), (5, 1, 5, 3, 7)]
)
def test_cells_scan_like_the_recurrence(chunk, groups, per_group, dim, size):
    """Two sequences side by side, the first from a given state, then padding."""
    lengths, cells = (3 * chunk - 2, chunk + 1), 7
    heads = groups * per_group
    start = normal(9, heads, dim, size)
    made = scan_inputs(sum(lengths), groups, per_group, dim, size)
    spans = [-(-length // chunk) for length in lengths]
    arrays = {}
    for name in ("x", "dt", "keys", "queries"):
        first, second = np.split(made[name], [lengths[0]])
        parts = [
            in_cells(part, chunk, span)
            for part, span in zip((first, second), spans, strict=True)
        ]
        rest = jnp.zeros((cells - sum(spans), *parts[0].shape[1:]), jnp.float32)
        arrays[name] = jnp.concatenate([*parts, rest])
    loaded = np.zeros((cells, heads, dim, size), np.float32)
    loaded[0] = start
    is_first = np.zeros(cells, bool)
    is_first[[0, spans[0]]] = True
    x = arrays["x"].reshape(cells, chunk, groups, per_group, dim)
    out, before, after = scan_cells(
        x,
        arrays["dt"],
        jnp.asarray(made["rates"]),
        arrays["keys"],
        arrays["queries"],
        jnp.asarray(loaded),
        jnp.asarray(is_first),
    )
    out = np.asarray(out).reshape(cells * chunk, heads, dim)
    begin = 0
    for length, span, state, cell in (
        (lengths[0], spans[0], start, 0),
        (lengths[1], spans[1], np.zeros_like(start), spans[0]),
    ):
        own = {n: v[begin : begin + length] for n, v in made.items() if n != "rates"}
        right, states = oracle.recurrence(**own, rates=made["rates"], state=state)
        got = out[cell * chunk : cell * chunk + length]
        np.testing.assert_allclose(got, right, **TIGHT)
        for index in range(span):
            end = min((index + 1) * chunk, length)
            np.testing.assert_allclose(after[cell + index], states[end - 1], **TIGHT)
            if index:
                np.testing.assert_array_equal(
                    before[cell + index], after[cell + index - 1]
                )
        begin += length


def test_one_token_steps_are_the_recurrence():
    made = scan_inputs(6, 2, 3, 5, 4)
    right, states = oracle.recurrence(**made, state=np.zeros((6, 5, 4)))
    state = jnp.zeros((1, 6, 5, 4), jnp.float32)
    for token in range(6):
        out, state = step_rows(
            jnp.asarray(made["x"][token].reshape(1, 2, 3, 5)),
            jnp.asarray(made["dt"][token][None]),
            jnp.asarray(made["rates"]),
            jnp.asarray(made["keys"][token][None]),
            jnp.asarray(made["queries"][token][None]),
            state,
        )
        np.testing.assert_allclose(np.reshape(out, (6, 5)), right[token], **TIGHT)
    np.testing.assert_allclose(state[0], states[-1], **TIGHT)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("cut", [1, 2, 5, 8, 11])
def test_carried_rows_continue_the_convolution(width, cut):
    """A sequence cut once: the window of the second call is that of the whole."""
    chunk, channels, heads, length = 8, 6, 2, 16
    raw = normal(11, length, channels + heads)
    weight, bias = normal(12, channels, width), normal(13, channels)
    right = oracle.convolve(raw[:, :channels], weight, bias)
    conv = np.zeros((2, width - 1, channels), np.float32)
    tail = np.zeros((2, chunk - 1, channels + heads), np.float32)

    def call(begin, end, conv, tail, num_tail):
        first = begin // chunk
        fresh = np.full((2, chunk, channels + heads), 7.0, np.float32)  # garbage
        for position in range(begin, end):
            fresh[position // chunk - first, position % chunk] = raw[position]
        fill = [min(chunk, max(0, end - (first + c) * chunk)) for c in range(2)]
        cut = Cut(
            is_first=jnp.array([True, False]),
            lead=jnp.array([begin % chunk - num_tail, 0], jnp.int32),
            first_fresh=jnp.array([begin % chunk, 0], jnp.int32),
            fill=jnp.array(fill, jnp.int32),
        )
        window, steps = merge_carried(
            jnp.asarray(fresh), jnp.asarray(conv), jnp.asarray(tail), cut
        )
        out = convolve(window, jnp.asarray(weight), jnp.asarray(bias))
        for position in range(begin, end):
            got = (position // chunk - first, position % chunk)
            np.testing.assert_allclose(out[got], right[position], **TIGHT)
            np.testing.assert_array_equal(steps[got], raw[position, channels:])
        cell = (end - 1) // chunk - first
        count = end - (first + cell) * chunk
        return rows_to_store(
            window[jnp.array([cell])],
            steps[jnp.array([cell])],
            cut.lead[jnp.array([cell])],
            jnp.array([count], jnp.int32),
            jnp.array([count == chunk]),
            size=chunk - 1,
        )

    stored = call(0, cut, conv, tail, 0)
    assert int(stored.num_tail[0]) == cut % chunk
    np.testing.assert_array_equal(
        stored.tail[0][: cut % chunk], raw[cut // chunk * chunk : cut]
    )
    assert not np.asarray(stored.tail[0][cut % chunk :]).any()
    conv[0], tail[0] = stored.conv[0], stored.tail[0]
    call(cut, length, conv, tail, cut % chunk)


def test_attention_over_pages_is_attention():
    """Ragged groups, shuffled pages, a padding group, a wide table."""
    page, kv_heads, heads, dim, scale = 4, 2, 6, 5, 0.3
    lengths, queries_at = (11, 3), ((8, 9, 10), (0, 1, 2))
    tables = np.full((3, 6), -1, np.int32)
    tables[0, :3], tables[1, :1] = [5, 0, 3], [2]
    pages = np.full((2, 2, 7, page, kv_heads, dim), np.nan, np.float32)
    stored = [
        normal(20 + r, 2, length, kv_heads, dim) for r, length in enumerate(lengths)
    ]
    pages[:, 1] = 9.0  # keys that nobody may see
    for row, values in enumerate(stored):
        for token in range(lengths[row]):
            at = (tables[row, token // page], token % page)
            pages[:, 1, at[0], at[1]] = values[:, token]
    q = normal(30, 3, 3, heads, dim)
    got = paged_attention(
        jnp.asarray(q),
        jnp.asarray(pages[0]),
        jnp.asarray(pages[1]),
        jnp.asarray(tables),
        jnp.array([*queries_at, (0, 1, 2)], jnp.int32),
        jnp.array([11, 3, 0], jnp.int32),
        layer=1,
        scale=scale,
    )
    for row, positions in enumerate(queries_at):
        for column, position in enumerate(positions):
            seen = stored[row][:, : position + 1]
            right = oracle.attention(q[row, column], seen[0], seen[1], scale)
            np.testing.assert_allclose(got[row, column], right, **TIGHT)
    assert not np.asarray(got[2]).any()


def test_keys_without_a_page_are_written_nowhere():
    tables = jnp.array([[4, -1]], jnp.int32)
    positions = jnp.array([[0, 3, 4, 9]], jnp.int32)
    valid = jnp.array([[True, False, True, True]])
    pages, offsets = page_slots(tables, positions, valid, page_size=4, num_pages=6)
    assert pages.tolist() == [[4, 6, 6, 6]]
    assert offsets.tolist() == [[0, 3, 0, 1]]


@pytest.mark.parametrize("gate", ["gate_then_norm", "norm_then_gate", "gate_only"])
def test_gated_norm(gate):
    y, z, weight = normal(1, 3, 12), normal(2, 3, 12), normal(3, 12)
    got = gated_norm(
        jnp.asarray(y),
        jnp.asarray(z),
        jnp.asarray(weight),
        gate=gate,
        groups=3,
        eps=1e-3,
    )
    for row in range(3):
        right = oracle.gated_norm(y[row].astype(float), z[row], weight, gate, 3, 1e-3)
        np.testing.assert_allclose(got[row], right, **TIGHT)


def test_rotary_turns_part_of_a_head():
    x = normal(1, 2, 3, 8)
    got = rotate(
        jnp.asarray(x), jnp.array([4, 70], jnp.int32), dim=6, theta=500.0, scaling=2.0
    )
    for token, position in enumerate((4, 70)):
        for head in range(3):
            right = oracle.rotate(x[token, head], position, 6, 500.0, 2.0)
            np.testing.assert_allclose(got[token, head], right, **TIGHT)


EXPERT = MlpConfig(size=4, activation="relu", gated=False)


def check_routes(moe, logits, bias, rule):
    index, weights = route(moe, jnp.asarray(logits), bias)
    for token in range(len(logits)):
        right = rule(logits[token])
        assert list(index[token]) == list(right)
        np.testing.assert_allclose(weights[token], list(right.values()), **TIGHT)


def test_softmax_routing():
    moe = MoeConfig(num_experts=6, top_k=3, expert=EXPERT)
    check_routes(moe, normal(1, 9, 6), None, lambda one: oracle.route_softmax(one, 3))


@pytest.mark.parametrize("normalise", [True, False])
def test_group_routing_chooses_with_the_bias_and_weighs_without(normalise):
    moe = MoeConfig(
        num_experts=12,
        top_k=3,
        expert=EXPERT,
        router="sigmoid_groups",
        num_groups=4,
        top_groups=2,
        normalise=normalise,
        scaling=2.5,
    )
    bias = normal(2, 12)
    check_routes(
        moe,
        normal(1, 9, 12),
        jnp.asarray(bias),
        lambda one: oracle.route_groups(one, bias, 3, 4, 2, normalise, 2.5),
    )


def test_both_expert_forms_multiply_the_same():
    x, up, down = normal(1, 7, 5), normal(2, 4, 6, 5), normal(3, 4, 5, 6)
    index = np.array([[0, 1], [1, 3], [3, 0], [0, 3], [1, 0], [3, 1], [1, 0]], np.int32)
    weights = np.abs(normal(4, 7, 2))
    right = np.zeros((7, 5))
    for token in range(7):
        for rank in range(2):
            expert = index[token, rank]
            inner = np.maximum(up[expert] @ x[token], 0)
            right[token] += weights[token, rank] * (down[expert] @ inner)
    arrays = [jnp.asarray(v) for v in (x, up, down, index, weights)]
    for form in (experts_dense, experts_ragged):
        run = jax.jit(form, static_argnames="inner")
        got = run(*arrays, inner=jax.nn.relu)
        np.testing.assert_allclose(got, right, **TIGHT)
