"""A mask of pictures goes on by token: Mllama writes plain's text about a picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from tests.helpers.caches import assert_same_cache
from tests.helpers.compared import compared
from tests.helpers.models import VOCAB, enlarged, prompt
from tests.helpers.outputs import assert_close

_PICTURE = VOCAB - 1


def tiny_mllama() -> Any:
    """A model whose second and fourth layer attend to a picture, and whose gates are open."""
    text = {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"cross_attention_layers": [1, 3], "pad_token_id": 0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    vision = {
        **{"hidden_size": 16, "intermediate_size": 16, "attention_heads": 2, "image_size": 8},
        **{"num_hidden_layers": 2, "num_global_layers": 1, "patch_size": 4, "max_num_tiles": 2},
        **{"vision_output_dim": 32, "intermediate_layers_indices": [0]},
        "supported_aspect_ratios": [[1, 1], [1, 2]],
    }
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=_PICTURE)
    torch.manual_seed(0)
    model = enlarged(MllamaForConditionalGeneration(config).eval(), 3.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(1.0)
    model.generation_config.eos_token_id = None
    return model


def call(rows: int, seed: int = 0) -> dict[str, Any]:
    """A sampled call about a random picture behind the second token."""
    ids = prompt(rows, 10, seed=3).clamp(max=_PICTURE - 1)
    ids[:, 2] = _PICTURE
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    seen = torch.zeros(rows, 10, 1, 2, dtype=torch.long)
    seen[:, 2:, :, 0] = 1
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(rows, 1, 2, 3, 8, 8, generator=generator),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]]).repeat(rows, 1, 1),
        "cross_attention_mask": seen,
        **{"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": 24},
        **{"return_dict_in_generate": True, "output_logits": True},
    }


@pytest.mark.parametrize("rows", [1, 3])
def test_a_picture_is_seen_in_every_step(rows: int) -> None:
    model = tiny_mllama()
    both = compared(model, lambda: call(rows), 10)
    assert_close(both.ours.logits, both.plain.logits, atol=1e-4, rtol=1e-4)
    assert_same_cache(both.ours.past_key_values, both.plain.past_key_values)
    assert both.stats.num_moved > 0
    torch.manual_seed(7)
    assert model.generate(**call(rows, seed=5)).sequences.tolist() != both.plain.sequences.tolist()
