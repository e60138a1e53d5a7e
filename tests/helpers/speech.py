"""Tiny random models that write down speech, and what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor, WhisperTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.helpers.models import tiny

FRAMES = 40  # Frames of sound that the tiny Whisper hears at once

_SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"]
_SPECIAL += ["<|startoflm|>", "<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>"]


def whisper_tokenizer() -> WhisperTokenizer:
    """One token per byte, then Whisper's own ones and timestamps."""
    times = [f"<|{0.02 * step:.2f}|>" for step in range(21)]
    names = [*bytes_to_unicode().values(), *_SPECIAL, *times]
    vocab = {name: index for index, name in enumerate(names)}
    return WhisperTokenizer(vocab=vocab, merges=[], extra_special_tokens=_SPECIAL[1:])


def tiny_whisper(attn: str = "sdpa") -> Any:
    """A tiny random Whisper whose texts are varied and do not end by themselves."""
    tokenizer = whisper_tokenizer()
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(_SPECIAL), strict=True))
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    own = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), end)
    own |= {"vocab_size": len(tokenizer), "decoder_start_token_id": start}
    model = tiny("whisper", attn, **own)
    settings = model.generation_config
    settings.eos_token_id = end
    # Bytes that are no characters would make different texts look the same.
    ascii_ones = {token for token in range(256) if tokenizer.decode([token]).isascii()}
    settings.suppress_tokens = sorted(set(range(256)) - ascii_ones | set(ids.values()))
    settings.no_timestamps_token_id = ids["<|notimestamps|>"]
    settings.prev_sot_token_id = ids["<|startofprev|>"]
    settings.is_multilingual = False
    settings.alignment_heads = [[0, 1], [2, 3]]
    return model


def whisper_features() -> WhisperFeatureExtractor:
    """Turns sound into as many frames as the tiny Whisper hears."""
    return WhisperFeatureExtractor(
        feature_size=8, sampling_rate=16_000, hop_length=800, chunk_length=2, n_fft=800
    )


def frames(rows: int = 1, columns: int = FRAMES, seed: int = 0) -> torch.Tensor:
    """Random frames of sound, [rows, 8, columns]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, columns, generator=generator)


def wave(seconds: float = 0.5) -> np.ndarray:
    """Noise at 16 kHz, [samples]."""
    samples = int(16_000 * seconds)
    return np.random.default_rng(0).standard_normal(samples).astype(np.float32)
