"""A table of public hybrid models.

`order` has one letter for each layer or part of one: M Mamba-2, 1 Mamba-1, G gated
delta net, K Kimi delta attention, * attention, L latent attention, - dense
feed-forward, E experts, P attention and Mamba-2 side by side with a feed-forward layer
behind them.

Facts from the models' published configurations; a `note` says what was not checked.
"""

from jaxsched.cache import sizing_layers as layers
from jaxsched.cache.sizing_layers import LayerShape

# Keys of a model: hidden, heads (queries, KV heads, head dim), mlp (width, gated),
# mamba2 (heads, head dim, state, groups, conv), moe (experts, width, shared width,
# gated, latent width), vocab, context, tied.
PUBLIC_MODELS = {
    "Nemotron-H-8B": {
        "order": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        "hidden": 4096,
        "heads": (32, 8, 128),
        "mlp": (21504, False),
        "mamba2": (128, 64, 128, 8, 4),
        "vocab": 131072,
        "context": 8192,
    },
    "Nemotron-H-47B": {
        "order": "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
        "M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        "hidden": 8192,
        "heads": (64, 8, 128),
        "mlp": (30720, False),
        "mamba2": (256, 64, 256, 8, 4),
        "vocab": 131072,
        "context": 8192,
        "note": "KV heads, groups and convolution as in its sister models",
    },
    "Nemotron-H-56B": {
        "order": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
        "hidden": 8192,
        "heads": (64, 8, 128),
        "mlp": (32768, False),
        "mamba2": (256, 64, 256, 8, 4),
        "vocab": 131072,
        "context": 8192,
    },
    "Nemotron-Nano-9B-v2": {
        "order": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "hidden": 4480,
        "heads": (40, 8, 128),
        "mlp": (15680, False),
        "mamba2": (128, 80, 128, 8, 4),
        "vocab": 131072,
        "context": 131072,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "order": "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
        "hidden": 2688,
        "heads": (32, 2, 128),
        "moe": (128, 1856, 3712, False, 0),
        "mamba2": (64, 64, 128, 8, 4),
        "vocab": 131072,
        "context": 262144,
    },
    "Nemotron-3-Super-120B-A12B": {
        "order": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden": 4096,
        "heads": (32, 2, 128),
        "moe": (512, 2688, 5376, False, 1024),
        "mamba2": (128, 64, 128, 8, 4),
        "vocab": 131072,
        "context": 262144,
    },
    "Bamba-9B": {
        "order": "M-M-M-M-M-M-M-M-M-*-M-M-M-M-M-M-M-M-*-M-M-M-M-M-M-M-M-*-M-M-M-M-",
        "hidden": 4096,
        "heads": (32, 8, 128),
        "mlp": (14336, True),
        "mamba2": (128, 64, 128, 1, 4),
        "vocab": 128256,
        "context": 4096,
        "note": "vocabulary not checked",
    },
    "Granite-4.0-H-Tiny": {
        "order": "MEMEMEMEME*E" + "MEMEMEMEMEMEMEMEME*E" * 3 + "MEMEMEME",
        "hidden": 1536,
        "heads": (12, 4, 128),
        "moe": (64, 512, 1024, True, 0),
        "mamba2": (48, 64, 128, 1, 4),
        "vocab": 100352,
        "context": 131072,
        "tied": True,
    },
    "Granite-4.0-H-1B": {
        "order": "M-M-M-M-M-*-" + "M-M-M-M-M-M-M-M-M-*-" * 3 + "M-M-M-M-",
        "hidden": 1536,
        "heads": (12, 4, 128),
        "mlp": (4096, True),
        "mamba2": (48, 64, 128, 1, 4),
        "vocab": 100352,
        "context": 131072,
        "tied": True,
    },
    "Granite-4.0-H-Small": {
        "order": "MEMEMEMEME*E" + "MEMEMEMEMEMEMEMEME*E" * 3 + "MEMEMEME",
        "hidden": 4096,
        "heads": (32, 8, 128),
        "moe": (72, 768, 1536, True, 0),
        "mamba2": (128, 64, 128, 1, 4),
        "vocab": 100352,
        "context": 131072,
        "tied": True,
        "note": "attention places and Mamba heads as in its sister models",
    },
    "Falcon-H1-0.5B": {
        "order": "P" * 36,
        "hidden": 1024,
        "heads": (8, 2, 64),
        "mlp": (2048, True),
        "mamba2": (24, 64, 128, 1, 4),
        "vocab": 32784,
        "context": 16384,
        "note": "query heads, feed-forward width and vocabulary not checked",
    },
    "Falcon-H1-1.5B": {
        "order": "P" * 24,
        "hidden": 2048,
        "heads": (8, 2, 128),
        "mlp": (4608, True),
        "mamba2": (48, 64, 256, 1, 4),
        "vocab": 65537,
        "context": 131072,
    },
    "Falcon-H1-3B": {
        "order": "P" * 32,
        "hidden": 2560,
        "heads": (10, 2, 128),
        "mlp": (6144, True),
        "mamba2": (32, 128, 256, 1, 4),
        "vocab": 65536,
        "context": 131072,
    },
    "Falcon-H1-7B": {
        "order": "P" * 44,
        "hidden": 3072,
        "heads": (12, 2, 128),
        "mlp": (12288, True),
        "mamba2": (24, 128, 256, 1, 4),
        "vocab": 130048,
        "context": 262144,
    },
    "Jamba-v0.1": {
        "order": "1-1E1-1E*-1E1-1E" * 4,
        "hidden": 4096,
        "heads": (32, 8, 128),
        "mlp": (14336, True),
        "moe": (16, 14336, 0, True, 0),
        "mamba1": (8192, 16, 256, 4),
        "vocab": 65536,
        "context": 262144,
    },
    "Zamba2-2.7B": {
        "order": "MMMMMMM*-" + "MMMMMM*-" * 6 + "MMMMM*-MMMM*-MM",
        "hidden": 2560,
        "heads": (32, 32, 160),
        "attention_input": 5120,
        "mlp": (10240, True),
        "mamba2": (80, 64, 64, 1, 4),
        "vocab": 32000,
        "context": 4096,
        "tied": True,
        "note": "its attention blocks share weights, here each counts; feed-forward "
        "width and Mamba heads not checked",
    },
    "Qwen3-Next-80B-A3B": {
        "order": "GEGEGE*E" * 12,
        "hidden": 2048,
        "heads": (16, 2, 256),
        "output_gate": True,
        "moe": (512, 512, 512, True, 0),
        "gated_delta_net": (16, 32, 128, 128, 4),
        "vocab": 151936,
        "context": 262144,
    },
    "Kimi-Linear-48B-A3B": {
        "order": "K-KEKELE" + "KEKEKELE" * 5 + "KEKELE",
        "hidden": 2304,
        "latent": (32, 512, 64, 128, 128),
        "mlp": (9216, True),
        "moe": (256, 1024, 1024, True, 0),
        "kimi_delta_attention": (32, 128, 128, 4),
        "vocab": 163840,
        "context": 1048576,
    },
}


def build_layers(facts: dict) -> tuple[LayerShape, ...]:
    """The layers of one entry of the table."""
    hidden = facts["hidden"]
    parts = {
        "M": lambda: [layers.mamba2(hidden, *facts["mamba2"])],
        "1": lambda: [layers.mamba1(hidden, *facts["mamba1"])],
        "G": lambda: [layers.gated_delta_net(hidden, *facts["gated_delta_net"])],
        "K": lambda: [
            layers.kimi_delta_attention(hidden, *facts["kimi_delta_attention"])
        ],
        "*": lambda: [_attention(facts)],
        "L": lambda: [layers.latent_attention(hidden, *facts["latent"])],
        "-": lambda: [layers.mlp(hidden, *facts["mlp"])],
        "E": lambda: [_experts(facts)],
        "P": lambda: [
            _attention(facts),
            layers.mamba2(hidden, *facts["mamba2"]),
            layers.mlp(hidden, *facts["mlp"]),
        ],
    }
    return tuple(layer for letter in facts["order"] for layer in parts[letter]())


def _attention(facts: dict) -> LayerShape:
    return layers.attention(
        facts["hidden"],
        *facts["heads"],
        output_gate=facts.get("output_gate", False),
        input_width=facts.get("attention_input"),
    )


def _experts(facts: dict) -> LayerShape:
    experts, inner, shared, gated, latent = facts["moe"]
    return layers.mixture_of_experts(
        facts["hidden"], experts, inner, gated, shared_inner=shared, latent=latent
    )
