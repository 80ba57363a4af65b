"""Published points are the listed ones, and the next point walks exactly over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxsched as js

next_point = jax.jit(js.next_snapshot_point)
publish = jax.jit(js.publish)
offsets = st.lists(st.integers(0, 130), max_size=3)


def _walk(table):
    """All points that `next_snapshot_point` finds from position 0 on."""
    position, points = jnp.zeros(table.num_rows, jnp.int32), []
    while True:
        position = next_point(table, position)
        if int(position[0]) == js.UNLIMITED:
            return points
        points.append(int(position[0]))


@given(
    prompt=st.integers(1, 120),
    interval=st.integers(0, 40),
    from_start=offsets,
    from_end=offsets,
    requested=st.sets(st.integers(0, 130), max_size=3),
    save_last=st.booleans(),
    block_size=st.integers(1, 40),
    enable=st.booleans(),
)
def test_the_walk_over_published_points_is_the_list(
    prompt, interval, from_start, from_end, requested, save_last, block_size, enable
):
    pad = [10**6] * 3
    rules = js.snapshot_rules(
        interval=interval,
        from_start=(from_start + pad)[:3],
        from_end=(from_end + pad)[:3],
        save_last=save_last,
        block_size=block_size,
        enable_prefix_caching=enable,
    )
    record = {"num_prompt_tokens": prompt, "requested_points": sorted(requested)}
    table = js.request_table([record], num_points=10, num_requested_points=3)
    listed = js.list_snapshot_points(
        prompt,
        interval=interval,
        from_start=from_start,
        from_end=from_end,
        requested=sorted(requested),
        save_last=save_last,
        block_size=block_size,
        enable_prefix_caching=enable,
    )
    assert _walk(publish(table, rules)) == [point for point in listed if point > 0]


@pytest.mark.parametrize(
    ("prompt", "interval", "points"),
    [
        (7639, 4096, [4096, 7616]),
        (7648, 4096, [4096, 7616]),
        (8193, 4096, [4096, 8192]),
        (100, 4096, [96]),
        (31, 4096, []),
        (64, 4096, [32]),
        (7639, 256, [*range(256, 7425, 256), 7616]),
        (7680, 256, sorted([*range(256, 7681, 256), 7648])),
    ],
)
def test_save_last_numbers(prompt, interval, points):
    assert points == js.list_snapshot_points(
        prompt, interval=interval, save_last=True, block_size=32
    )


def test_publishing_overwrites_what_was_there():
    table = js.request_table(
        [{"num_prompt_tokens": 64, "snapshot_points": [64], "snapshot_interval": 8}]
    )
    off = js.snapshot_rules(interval=64, enable_prefix_caching=False)
    cleared = publish(table.replace(snapshot_points=jnp.full((1, 4), 64)), off)
    assert int(cleared.snapshot_interval[0]) == 0
    assert np.all(np.asarray(cleared.snapshot_points) == js.NO_ID)


def test_too_few_columns_are_refused():
    table = js.request_table([{"num_prompt_tokens": 64}], num_points=2)
    rules = js.snapshot_rules(from_start=[1, 2], from_end=[0])
    with pytest.raises(ValueError, match="num_points=5"):
        js.publish(table, rules)


def test_several_points_ahead_end_with_unlimited():
    table = js.request_table(
        [{"num_prompt_tokens": 10, "snapshot_interval": 4, "snapshot_points": [5]}]
    )
    points = js.next_snapshot_points(table, jnp.int32([3]), 6)
    end = js.UNLIMITED
    assert points.tolist() == [[4, 5, 8, end, end, end]]
    here = [
        bool(js.is_snapshot_point(table, jnp.int32([position]))[0])
        for position in range(1, 12)
    ]
    assert [at for at, on in enumerate(here, start=1) if on] == [4, 5, 8]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interval", -1),
        ("interval", 2.5),
        ("from_start", [3, -4]),
        ("from_end", "7"),
        ("block_size", 0),
        ("interval", 2**31),
    ],
)
def test_bad_rules_name_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=field):
        js.snapshot_rules(**{field: value})
