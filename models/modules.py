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
import numpy as np
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


def random_init(seed: int, dtype: str) -> Init:
    """Initialiser of a model without a checkpoint, after Mamba-2's published one.

    Matrices are normal with variance 1 / inputs; decay rates are 1 to 16; time steps
    are 0.001 to 0.1, evenly in the logarithm; norms and skips are 1, biases 0. Drawn
    by NumPy: op by op, jax would compile the drawing of every shape.
    """
    draw = np.random.default_rng(seed)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("A_log"):
            return np.log(draw.uniform(1.0, 16.0, shape))
        if name.endswith("dt_bias"):
            steps = np.exp(draw.uniform(math.log(1e-3), math.log(0.1), shape))
            return steps + np.log(-np.expm1(-steps))  # the inverse of softplus
        if name.endswith(("norm.weight", ".D")):
            return np.ones(shape)
        if name.endswith("bias"):
            return np.zeros(shape)
        scale = 1.0 if name == "embed.weight" else shape[-1] ** -0.5
        return draw.standard_normal(shape, np.float32) * np.float32(scale)

    def init(name: str, shape: tuple[int, ...]) -> Array:
        kind = jnp.float32 if is_float32(name) else jnp.dtype(dtype)
        return jnp.asarray(values(name, shape).astype(kind))

    return init
