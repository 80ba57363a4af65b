"""The feed-forwards: dense, and mixtures of experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsched.models.config import MlpConfig, MoeConfig
from jaxsched.models.modules import Init, declare, linear, scoped
from jaxsched.models.moe import MoeForm, experts_dense, experts_ragged, route
from jaxsched.models.parameters import mlp_shapes, moe_shapes
from jaxsched.models.primitives import activation, matmul

Array = jax.Array


def inner(config: MlpConfig) -> Callable[[Array], Array]:
    """What stands between the two products: activation, and gate where there is one."""

    def apply(up: Array) -> Array:
        if not config.gated:
            return activation(config.activation, up)
        gate, up = jnp.split(up, 2, axis=-1)
        if config.gate_multiplier != 1.0:
            gate = gate * config.gate_multiplier
        return activation(config.activation, gate) * up

    return apply


class Mlp(nnx.Module):
    """A dense feed-forward."""

    def __init__(self, config: MlpConfig, size: int, init: Init):
        self.config = config
        declare(self, mlp_shapes(config, size), init)

    def __call__(self, x: Array, adapt: "nnx.Module | None" = None) -> Array:
        """[T, D] -> [T, D]; adapters, where given, are added to the first product."""
        up = linear(self.up, x)
        if adapt is not None:
            up = up + linear(adapt.mlp_up, linear(adapt.mlp_down, x))
        out = linear(self.down, inner(self.config)(up))
        if self.config.down_multiplier != 1.0:
            out = out * self.config.down_multiplier
        return out


class Moe(nnx.Module):
    """A mixture of experts, with a shared expert where the family has one."""

    def __init__(self, config: MoeConfig, size: int, form: MoeForm, init: Init):
        self.config = config
        self.form = form
        shapes = {
            name: shape
            for name, shape in moe_shapes(config, size).items()
            if not name.startswith("shared.")
        }
        declare(self, shapes, init)
        if config.shared is not None:
            self.shared = Mlp(config.shared, size, scoped(init, "shared"))

    def __call__(self, x: Array) -> Array:
        """[T, D] -> [T, D]."""
        moe = self.config
        logits = matmul(x.astype(jnp.float32), self._router())
        choice_bias = None
        if moe.router == "sigmoid_groups":
            choice_bias = self.router.bias[...]
        index, weights = route(moe, logits, choice_bias)
        hidden = linear(self.latent_in, x) if moe.latent_size else x
        run = experts_dense if self.form == MoeForm.DENSE else experts_ragged
        up, down = self.experts.up[...], self.experts.down[...]
        out = run(hidden, up, down, index, weights, inner(moe.expert))
        if moe.latent_size:
            out = linear(self.latent_out, out)
        return out if moe.shared is None else out + self.shared(x)

    def _router(self) -> Array:
        return self.router.weight[...].astype(jnp.float32)
