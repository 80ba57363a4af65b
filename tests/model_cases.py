"""Small models and folders for the tests of `models`."""

import json
import shutil
from pathlib import Path

from jaxsched.models.families import parse_config
from shared_data import ROOT

FOLDERS = ROOT / "tests" / "data" / "models"
FALCON, NEMOTRON = FOLDERS / "falcon_h1", FOLDERS / "nemotron_h_moe"

# Every published folder of these families that is kept outside the repository.
SHARED = (
    "bamba",
    "falcon_h1_normfirst",
    "granitemoehybrid",
    "mamba2",
    "nemotron_h",
    "zamba2",
)


def values_of(folder: Path) -> dict:
    """A folder's parsed config.json."""
    return json.loads((folder / "config.json").read_text())


def copy_of(folder: Path, target: Path, **changes) -> Path:
    """A copy of a folder, with some keys of its config.json changed."""
    shutil.copytree(folder, target)
    values = values_of(folder) | changes
    (target / "config.json").write_text(json.dumps(values))
    return target


# One odd-sized model of each family: sizes that are no multiples of a vector's width.
_MAMBA = {
    "mamba_n_heads": 5,
    "mamba_d_head": 6,
    "mamba_n_groups": 1,
    "mamba_d_state": 7,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_BODY = {
    "vocab_size": 19,
    "hidden_size": 15,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 11,
}
TINY = {
    "mamba2": {
        "vocab_size": 19,
        "hidden_size": 9,
        "num_heads": 3,
        "head_dim": 6,
        "state_size": 5,
        "n_groups": 3,
        "num_hidden_layers": 2,
        "chunk_size": 4,
        "use_bias": True,
        "conv_kernel": 3,
    },
    "bamba": {
        **_BODY,
        **_MAMBA,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "tie_word_embeddings": True,
    },
    "falcon_h1": {
        **_BODY,
        **_MAMBA,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "mamba_d_ssm": 30,
        "mamba_rms_norm": False,
        "mamba_proj_bias": True,
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.9, 1.1, 0.7, 0.8, 0.6],
        "ssm_out_multiplier": 0.7,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.8, 0.7],
    },
    "granitemoehybrid": {
        **_BODY,
        **_MAMBA,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 13,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
    "nemotron_h": {
        **_BODY,
        "hybrid_override_pattern": "M*E",
        "head_dim": 5,
        "mamba_num_heads": 5,
        "mamba_head_dim": 6,
        "ssm_state_size": 7,
        "n_groups": 5,
        "chunk_size": 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 9,
        "moe_shared_expert_intermediate_size": 10,
        "moe_latent_size": 7,
        "n_group": 3,
        "topk_group": 2,
    },
    "zamba2": {
        "vocab_size": 19,
        "hidden_size": 12,
        "num_attention_heads": 3,
        "intermediate_size": 11,
        "layers_block_type": ["hybrid", "hybrid"],
        "num_mem_blocks": 1,
        "adapter_rank": 3,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "mamba_d_state": 5,
        "n_mamba_heads": 4,
        "chunk_size": 4,
    },
}


def tiny(family: str, **changes):
    """The odd-sized model of a family."""
    return parse_config({"model_type": family, **TINY[family], **changes})
