"""Models of transformers are built without memory for their large parameters, with the same initial values."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the extra trainbus[integrations] is not installed")

from torch import nn

from tests.trainbus.test_deferred_model import assert_exact

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 100,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "BertForMaskedLM": {**SIZES, "vocab_size": 100},
    "LlamaForCausalLM": {**SIZES, "vocab_size": 100, "num_key_value_heads": 2},
    "MixtralForCausalLM": {**SIZES, "vocab_size": 100, "num_key_value_heads": 2, "num_local_experts": 4},
    "T5ForConditionalGeneration": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "ViTForImageClassification": {**SIZES, "image_size": 32, "patch_size": 8},
    "ResNetForImageClassification": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "Wav2Vec2ForCTC": {
        **SIZES,
        "conv_dim": (16, 16),
        "conv_stride": (2, 2),
        "conv_kernel": (3, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_are_those_of_the_plain_build(name: str) -> None:
    model_class = getattr(transformers, name)

    def build() -> nn.Module:
        return model_class(model_class.config_class(**CONFIGS[name]))  # type: ignore[no-any-return]

    assert_exact(build)
