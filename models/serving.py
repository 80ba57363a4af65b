"""A loaded model ready to step: weights as flat leaves, one executable a shape."""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsched.models.batch import Batch, StepShape, Work, build_batch
from jaxsched.models.config import ModelConfig
from jaxsched.models.hybrid import HybridModel
from jaxsched.models.loading import check_parameters, load_checkpoint
from jaxsched.models.modules import random_init
from jaxsched.models.moe import MoeForm
from jaxsched.models.parameters import is_float32
from jaxsched.models.pools import Pools

Array = jax.Array
Leaves = list[Array]


class ServedModel:
    """Weights, and the jitted step over them.

    Weights are a flat list of arrays taken out of the module once: handing the module
    itself to `jax.jit` costs milliseconds of host time a call. The pools are donated,
    so a step updates them in place: the ones passed in must not be used again.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, np.ndarray | Array],
        *,
        dtype: str = "float32",
        form: MoeForm = MoeForm.DENSE,
    ):
        """Puts parameters into place.

        Args:
          config: the model.
          parameters: one array a name of `parameters.parameter_shapes`.
          dtype: of the weights; "float32" or "bfloat16".
          form: how experts are multiplied.

        Raises:
          ValueError: if a parameter is missing, unknown, misshapen or mistyped.
        """
        check_parameters(config, parameters, dtype)
        self.config, self.dtype = config, dtype
        self._graph, state = nnx.split(abstract_model(config, dtype, form))
        names = [name for name, _ in _named_leaves(state)]
        self._names = {name: index for index, name in enumerate(names)}
        self.leaves: Leaves = [jnp.asarray(parameters[name]) for name in names]
        self._tree = jax.tree.structure(state)
        self._step = jax.jit(self._run, donate_argnames="pools")
        self._planned = jax.jit(
            self._run_work, static_argnames="shape", donate_argnames="pools"
        )

    @classmethod
    def load(cls, folder: str | Path, *, dtype: str = "float32", **options):
        """Loads a checkpoint folder; see `load_checkpoint` for what is refused."""
        config, parameters = load_checkpoint(folder, dtype)
        return cls(config, parameters, dtype=dtype, **options)

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int, *, dtype: str = "float32", **options
    ):
        """A model with random weights."""
        make = functools.partial(HybridModel, config)
        model = make(random_init(seed, dtype))
        parameters = dict(_named_leaves(nnx.state(model)))
        return cls(config, parameters, dtype=dtype, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the order of `leaves`."""
        return tuple(self._names)

    def parameter(self, name: str) -> np.ndarray | None:
        """One parameter's values in float32, or None if the model has none so named."""
        if name not in self._names:
            return None
        return np.asarray(self.leaves[self._names[name]].astype(jnp.float32))

    def step(self, pools: Pools, batch: Batch) -> tuple[Pools, Array]:
        """One step of a batch: the pools after it and f32[U + R, V] logits.

        Donates `pools`. Compiles once for each shape of the batch.
        """
        return self._step(self.leaves, pools, batch)

    def run_work(
        self, pools: Pools, work: Work, shape: StepShape
    ) -> tuple[Pools, Array, Batch]:
        """Lays work out and runs it, in one executable; see `build_batch`."""
        return self._planned(self.leaves, pools, work, shape=shape)

    def forward(self, leaves: Leaves, pools: Pools, batch: Batch):
        """The pure step, to be jitted by the caller inside a larger function."""
        return self._run(leaves, pools, batch)

    def _run(self, leaves: Leaves, pools: Pools, batch: Batch) -> tuple[Pools, Array]:
        model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))
        # TF32 products, the default on some GPUs, would miss float32 parity.
        precision = "highest" if self.dtype == "float32" else "default"
        with jax.default_matmul_precision(precision):
            return model(pools, batch)

    def _run_work(
        self, leaves: Leaves, pools: Pools, work: Work, *, shape: StepShape
    ) -> tuple[Pools, Array, Batch]:
        batch = build_batch(work, shape, pools.num_slots)
        return *self._run(leaves, pools, batch), batch


def abstract_model(config: ModelConfig, dtype: str, form: MoeForm) -> HybridModel:
    """The model with shapes in place of arrays: nothing is allocated."""

    def shaped(name: str, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, jnp.float32 if is_float32(name) else dtype)

    return nnx.eval_shape(lambda: HybridModel(config, shaped, form))


def _named_leaves(state: nnx.State) -> list[tuple[str, Array]]:
    """Parameters by dotted name, in the order of the state's leaves."""
    found, _ = jax.tree.flatten_with_path(state)
    return [(_dotted(path), leaf) for path, leaf in found]


def _dotted(path: tuple) -> str:
    # Keys of the state's dictionaries; the last step, into the variable, has none.
    return ".".join(str(part.key) for part in path if hasattr(part, "key"))
