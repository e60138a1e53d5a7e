"""Whole `generate` calls with all kernels, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import lookahead_hf
from lookahead_hf import SpeculativeConfig, kernels
from lookahead_hf.block.block import Block, HeldSlots, MaskKind
from lookahead_hf.model import self_test
from lookahead_hf.runner import attention, outputs
from lookahead_hf.runner.forward import ForwardContext, running
from tests.helpers import models
from tests.helpers.compared import compared, speculated
from tests.helpers.flash import with_flash
from tests.helpers.scripted import second_child_right

NEW = 7
WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


pytestmark = pytest.mark.usefixtures("calls")


def ragged(device: torch.device) -> dict[str, Any]:
    """Two prompts of different lengths, padded on the left."""
    return {name: each.to(device) for name, each in models.left_padded((0, 9), 14).items()}


def run(model: Any, inputs: dict[str, Any], device: torch.device, **settings: Any) -> Any:
    """Plain's text, in trees whose right path is not their first one."""
    given = {**inputs, "max_new_tokens": NEW, "pad_token_id": 0, **settings}
    columns = inputs["input_ids"].shape[1]
    own = {"compiled_layers": False}  # Triton's kernels attend
    done = compared(model.to(device), lambda: dict(given), columns, second_child_right, **own)
    assert done.stats.num_moved > 0
    return done.stats


@pytest.mark.parametrize(
    ("name", "fields"), [("llama", {"num_hidden_layers": 2}), ("gemma3", WINDOWS)]
)
def test_greedy(
    calls: Counter[str], checked: None, device: torch.device, name: str, fields: dict[str, Any]
) -> None:
    stats = run(models.tiny(name, **fields), ragged(device), device)
    assert stats.engine == "device"
    assert calls["verify_tree"] == stats.num_steps > 0
    num_groups = 1 + (name == "gemma3")  # of layers that take the same mask
    assert calls["compact_path"] == num_groups * stats.num_steps
    assert calls["tree_attention"] == 2 * stats.num_steps


def test_drafting_learns_from_the_pass_of_verification(
    calls: Counter[str],
    attention_aside: None,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """The verdict is on its way before the best tokens are looked for, which come behind it."""
    model = models.tiny("llama", num_hidden_layers=1).to(device)
    given = {"input_ids": models.prompt(2).to(device), "max_new_tokens": 24, "do_sample": False}
    order: list[str] = []
    send, topk = outputs.HostCopy.send, kernels.topk_rows

    def sent(copy: outputs.HostCopy) -> None:
        order.append("copy")
        send(copy)

    def looked(*args: Any) -> Any:
        assert args[2] is not None
        order.append("topk")
        return topk(*args)

    monkeypatch.setattr(outputs.HostCopy, "send", sent)
    monkeypatch.setattr(kernels, "topk_rows", looked)
    few = {"recycling": {"top_k": 4, "num_next": 4}}
    config = SpeculativeConfig(drafters=("recycling",), budget=6, options=few)
    stats = compared(model, lambda: dict(given), 12, config=config).stats
    assert stats.engine == "device"
    assert order == ["copy", "topk", "copy"] * stats.num_steps
    assert calls["topk_rows"] == calls["verify_tree"] == stats.num_steps


def test_rejection(calls: Counter[str], attention_aside: None, device: torch.device) -> None:
    """Drawn drafts of all rows are walked in one launch a step."""
    model, assistant = (
        models.tiny("llama", scale=scale, num_hidden_layers=1).to(device) for scale in (None, 4.0)
    )
    config = SpeculativeConfig(
        drafters=("assistant",), verification="rejection", budget=16,
        options={"assistant": {"min_reach": 0.0, "num_draft": 2}},
    )  # fmt: skip
    given = {"input_ids": models.prompt(3).to(device), "do_sample": True, "temperature": 2.0}
    given |= {"max_new_tokens": 8, "pad_token_id": 0, "assistant_model": assistant}
    texts = []
    with lookahead_hf.enabled(model):
        for _ in range(2):
            torch.manual_seed(5)
            texts.append(model.generate(**given, speculative=config).tolist())
    stats = speculated(model)
    assert texts[0] == texts[1] and stats.engine == "rejection"
    assert calls["reject_tree"] == 2 * (1 + stats.num_steps)


def test_verified_on_the_host(calls: Counter[str], checked: None, device: torch.device) -> None:
    """Steps whose states are returned are laid out there; windows drop what they need not."""
    model = models.tiny("mistral", num_hidden_layers=1, sliding_window=5)
    shown = {"return_dict_in_generate": True, "output_hidden_states": True}
    stats = run(model, ragged(device), device, **shown)
    assert (stats.engine, stats.execution) == ("walk", "model")
    assert calls["tree_attention"] == stats.num_steps > 0


def tiny_eager(name: str, device: torch.device) -> Any:
    """A tiny model of a kind whose attention sdpa does not have."""
    model = models.tiny(name, attn="eager").to(device)
    # The first look at a kind of model takes forwards of its own.
    assert self_test.refusal(model) == ("", "")
    return model


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks(
    calls: Counter[str], checked: None, device: torch.device, name: str
) -> None:
    model = tiny_eager(name, device)
    calls.clear()
    stats = run(model, {"input_ids": models.prompt(1).to(device)}, device)
    assert calls["tree_attention"] == 2 * stats.num_steps > 0
    assert model.config._attn_implementation == "eager"
    assert type(model.config._attn_implementation) is str  # not ours


def test_flash_attention_is_left_to_the_kernel(
    calls: Counter[str], checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU alone: there are stand-ins for its own kernels."""
    model = tiny_eager("gpt_oss", torch.device("cpu"))
    flash = with_flash(model, "flash_attention_3", monkeypatch)
    assert self_test.refusal(model) == ("", "")  # with forwards, unless another one has passed
    calls.clear()
    stats = run(model, ragged(model.device), model.device)
    assert stats.engine == "device"
    assert calls["tree_attention"] == 2 * stats.num_steps > 0
    assert flash.widths.count(14) == 4  # the prompt, of plain generation and of ours, in two layers


def test_sdpa_is_not_given_what_it_has_not(calls: Counter[str], device: torch.device) -> None:
    """Older models hand sdpa soft caps or sinks, which it looks past: so do we under its name."""
    attend = attention._ours("sdpa")
    hidden = torch.tensor([[0.0, -1e38, -1e38], [0.0, 0.0, -1e38]], device=device)[None, None]
    q, k = torch.randn(1, 4, 2, 16, device=device), torch.randn(1, 2, 3, 16, device=device)
    query, none = torch.tensor([[0, 1]], device=device), torch.tensor([0], device=device)
    held = {"all": HeldSlots(MaskKind("all"), none, 3, none, None)}
    block = Block(np.array([[-1, 0]]), query, none, held, torch.float32, for_kernel=True)
    block.masks["all"] = hidden
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    with running(ForwardContext(block), device):
        ours, _ = attend(module, q, k, k, hidden)
        assert calls["tree_attention"] == 1
        theirs, _ = attend(module, q, k, k, hidden, s_aux=torch.zeros(4, device=device))
        assert calls["tree_attention"] == 1
    torch.testing.assert_close(ours, theirs)
