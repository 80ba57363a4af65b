"""How parameters hang in `flax.nnx` modules, and how they begin.

A module declares its parameters by the shapes of `parameters`, so that names and shapes
are written down once. Modules hold parameters and nothing else: caches go in and out
of their calls as arguments.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsched.models.parameters import Shapes, is_float32
from jaxsched.models.primitives import along_last, matmul

Array = jax.Array
Init = Callable[[str, tuple[int, ...]], Array]


class Streams(NamedTuple):
    """The two token streams of a step. One that a step does not have is None.

    That is settled by the step's shape: a stream never leaves the traced function.
    """

    cells: Array | None  # [C * Q, D]
    rows: Array | None  # [R, D]

    def map(self, function: Callable[..., Array], *others: "Streams") -> "Streams":
        """A function of tokens, applied to each stream by itself."""
        return Streams(
            *(
                None if parts[0] is None else function(*parts)
                for parts in zip(self, *others, strict=True)
            )
        )

    def add(self, other: "Streams") -> "Streams":
        """The sum, stream by stream."""
        return self.map(jnp.add, other)


class Group(nnx.Module):
    """Parameters that share the first part of their name."""


def declare(module: nnx.Module, shapes: Shapes, init: Init) -> None:
    """Hangs a parameter in the module for every name, groups where names have dots."""
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        home = module
        for part in path:
            if not hasattr(home, part):
                setattr(home, part, Group())
            home = getattr(home, part)
        setattr(home, leaf, nnx.Param(init(name, shape)))


def scoped(init: Init, prefix: str) -> Init:
    """The same initialiser for names below a prefix."""
    return lambda name, shape: init(f"{prefix}.{name}", shape)


def bias(group: Group) -> Array | None:
    """A linear map's bias, or None."""
    return group.bias[...] if hasattr(group, "bias") else None


def linear(group: Group, x: Array) -> Array:
    """`x @ weight.T + bias`."""
    out = matmul(x, group.weight[...])
    added = bias(group)
    return out if added is None else out + along_last(added, out)


def random_init(rngs: nnx.Rngs, dtype: str) -> Init:
    """Initialiser of a model without a checkpoint, after Mamba-2's published one.

    Matrices are normal with variance 1 / inputs; decay rates are 1 to 16; time steps
    are 0.001 to 0.1, evenly in the logarithm; norms and skips are 1, biases 0.
    """

    def init(name: str, shape: tuple[int, ...]) -> Array:
        kind = jnp.float32 if is_float32(name) else jnp.dtype(dtype)
        if name.endswith("A_log"):
            rates = jax.random.uniform(rngs.params(), shape, minval=1.0, maxval=16.0)
            return jnp.log(rates)
        if name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(0.1)
            share = jax.random.uniform(rngs.params(), shape, minval=low, maxval=high)
            steps = jnp.exp(share)
            return steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
        if name.endswith(("norm.weight", ".D")):
            return jnp.ones(shape, kind)
        if name.endswith("bias"):
            return jnp.zeros(shape, kind)
        scale = 1.0 if name == "embed.weight" else shape[-1] ** -0.5
        return (jax.random.normal(rngs.params(), shape) * scale).astype(kind)

    return init
