"""A key is the same sum whatever the block size, the depth and the padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.cache.keys import prompt_keys


def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def _term(token, position):
    x = (token * 0x9E3779B1 + position * 0x85EBCA77 + 0x165667B1) % 2**32
    x = _mix(x)
    y = (x ^ (x >> 15)) * 0x2C1B3C6D % 2**32
    return x, y ^ (y >> 13)


def _root(lora_id, salt):
    x = _mix(_mix(lora_id * 0xC2B2AE3D % 2**32) ^ (salt * 0x27D4EB2F % 2**32))
    y = (x ^ (x >> 15)) * 0x2C1B3C6D % 2**32
    return x, y ^ (y >> 13)


@pytest.mark.parametrize("size", [1, 3, 8, 16, 48])
@pytest.mark.parametrize("bits", [32, 5])
def test_keys_are_plain_sums(size, bits):
    random = np.random.default_rng(size)
    tokens = random.integers(0, 2**31, (3, 48))
    lora_id, salt = [-1, 0, 7], [0, 5, 2**31 - 1]
    keys = prompt_keys(
        jnp.int32(tokens), jnp.int32(lora_id), jnp.int32(salt),
        block_size=size, bits=bits,
    )  # fmt: skip
    at = np.asarray(
        keys.at(jnp.broadcast_to(jnp.arange(49), (3, 49)).astype(jnp.int32))
    )
    ends = np.asarray(keys.block_keys)
    for row in range(3):
        words = list(_root(lora_id[row] % 2**32, salt[row]))
        for depth in range(49):
            want = [word % 2**bits for word in words]
            assert at[:, row, depth].tolist() == want
            if depth and depth % size == 0:
                assert ends[:, row, depth // size - 1].tolist() == want
            if depth < 48:
                more = _term(int(tokens[row, depth]), depth)
                words = [(w + m) % 2**32 for w, m in zip(words, more, strict=True)]


def test_order_and_position_matter():
    lists = jnp.int32([[1, 2, 0, 0], [2, 1, 0, 0], [0, 1, 2, 0]])
    none = jnp.full(3, -1, jnp.int32)
    keys = prompt_keys(lists, none, jnp.zeros(3, jnp.int32), block_size=4).block_keys
    assert len(set(map(tuple, np.asarray(keys)[:, :, 0].T.tolist()))) == 3


def test_prompts_are_padded_to_whole_blocks():
    none = jnp.full(1, -1, jnp.int32)
    with pytest.raises(ValueError, match="a multiple of block_size=4"):
        prompt_keys(jnp.zeros((1, 6), jnp.int32), none, none, block_size=4)
