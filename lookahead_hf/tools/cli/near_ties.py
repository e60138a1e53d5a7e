"""Finds where a text diverges from plain generation, and whether two tokens are nearly tied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lookahead_hf.tools.cli.screen import CommandError

if TYPE_CHECKING:
    import torch

MOST_ULPS = 6
"""Rounding may move two logits this far against each other, in units of the last place.

The unit is that of the larger logit, or of the median size of the step's logits if that is more:
the error comes from the hidden state and does not shrink with a single logit. In bfloat16, blocks
of 1 to 17 tokens moved two logits of 6.4 by 0.22 against each other, 7 units of their own, where
the other logits are near -10.

Over 395 steps of SmolLM2-135M, plain single tokens, blocks by torch and compiled layers have the
same error against float32: 0.071, 0.072 and 0.075 for one of the five best logits (its standard
deviation), so that two ways move two logits by 2.3 units against each other, and seldom by 5.
"""

SHIFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
"""Shifts of a logit that are tried, in units of the last place."""

Text = Sequence[int]


@dataclass(frozen=True)
class Divergence:
    """The first token of a row that differs from the plain run's.

    One of the two logits must move by `ulps`, units of the last place, before plain decoding takes
    the other token; None: no shift that was tried is enough. Instead of a token, None stands for
    the end of a text.
    """

    row: int
    num_same: int  # tokens before it
    plain: int | None
    other: int | None
    ulps: int | None = None

    @property
    def is_near_tie(self) -> bool:
        return self.ulps is not None and self.ulps <= MOST_ULPS


def describe(divergences: Sequence[Divergence | None]) -> str:
    """Say how many texts part from the plain run's, and whether all do so at near ties."""
    found = [divergence for divergence in divergences if divergence is not None]
    if not found:
        return f"identical, {len(divergences)} of {len(divergences)}"
    beyond = [divergence for divergence in found if not divergence.is_near_tie]
    if beyond:
        return f"BUG: parts beyond near ties, {len(beyond)} of {len(divergences)}"
    most = max(divergence.ulps or 0 for divergence in found)
    return f"parts at near ties only, {len(found)} of {len(divergences)} (at most {most} ulps)"


def find_divergences(
    model: Any,
    call: Mapping[str, Any],
    plain: Sequence[Text],
    others: Sequence[Sequence[Text]],
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> list[list[Divergence | None]]:
    """Compare texts with those of plain decoding; where they part, decode again and look closely.

    The logits are those of plain decoding itself: its batch, its cache, one token per step. One
    logit after the other is then shifted, and plain decoding's own processors and choice (the
    largest score, or the draw for this seed and step) decide again.

    Args:
        model: An enabled model.
        call: Arguments of plain `generate`, inputs included.
        plain: New tokens of each row by plain decoding, up to and with the end token.
        others: The same of other runs of that call.
        seed: Seed of all these runs.
        dtype: What logits are rounded to; None is the type of the weights.

    Returns:
        How each row of `others` parts; None: it is identical. CommandError if plain decoding did
            not write the same text again.
    """
    places = [
        [_place(row, *pair) for row, pair in enumerate(zip(plain, rows, strict=True))]
        for rows in others
    ]
    wanted = {place for rows in places for place in rows if place is not None}
    found = _examine(model, call, wanted, plain, seed, dtype or model.dtype) if wanted else {}
    return [[found[place] if place else None for place in rows] for rows in places]


def _place(row: int, plain: Text, other: Text) -> Divergence | None:
    index = first_difference(plain, other)
    if index is None:
        return None
    tokens = (text[index] if index < len(text) else None for text in (plain, other))
    return Divergence(row, index, *tokens)


def first_difference(left: Text, right: Text) -> int | None:
    """Return the index of the first token that differs, None where the texts are identical."""
    if list(left) == list(right):
        return None
    pairs = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


def _examine(
    model: Any,
    call: Mapping[str, Any],
    wanted: set[Divergence],
    plain: Sequence[Text],
    seed: int,
    dtype: torch.dtype,
) -> dict[Divergence, Divergence]:
    """Run plain decoding up to the last of these places, and look at each of them."""
    import torch

    from lookahead_hf.model import compat

    # Without a token there is no logit: a text stopped where no end token made it.
    found = {place: place for place in wanted if None in (place.plain, place.other)}

    def decode(
        model: Any,
        input_ids: torch.Tensor,  # [rows, columns]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        columns = input_ids.shape[1]

        def watch(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            for place in wanted - found.keys():
                if columns + place.num_same == ids.shape[1]:
                    written = ids[place.row, columns:].tolist()
                    _check_repeated(written == list(plain[place.row][: place.num_same]))
                    choose = partial(_choices, logits_processor, generation_config.do_sample, ids)
                    found[place] = _measure(place, choose, logits, dtype)
            return logits_processor(ids, logits)

        given = input_ids, watch, stopping_criteria, generation_config
        return compat.run_loop(model, *given, **kwargs)

    last = max(place.num_same for place in wanted)
    settings = {**call, "max_new_tokens": last + 1, "speculative": False, "streamer": None}
    torch.manual_seed(seed)
    model.generate(**settings, custom_generate=decode)
    _check_repeated(found.keys() == wanted)
    return found


def _choices(
    processors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    do_sample: bool,
    ids: torch.Tensor,  # [rows, columns]
    logits: torch.Tensor,  # [rows, vocab]
) -> list[int]:
    """Choose the next token of every row as plain decoding does; draws change no generator."""
    import torch

    with torch.random.fork_rng([logits.device] if logits.device.type == "cuda" else []):
        scores = processors(ids, logits.clone())
        if do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist()
        return scores.argmax(-1).tolist()


def _measure(
    place: Divergence,
    choose: Callable[[torch.Tensor], list[int]],
    logits: torch.Tensor,  # [rows, vocab]
    dtype: torch.dtype,
) -> Divergence:
    """Shift the two logits of a place until plain decoding takes the other token."""
    import torch

    row, plain, other = place.row, place.plain, place.other
    assert plain is not None and other is not None
    _check_repeated(choose(logits)[row] == plain)
    sizes = logits[row].abs()
    size = float(torch.maximum(sizes[[plain, other]].max(), sizes.median()))
    spacing = _spacing(size, dtype)
    for ulps in SHIFTS:
        shift = (ulps + 0.01) * spacing  # beyond a tie, which the smaller token id would win
        for token, by in ((other, shift), (plain, -shift)):
            shifted = logits.clone()
            shifted[row, token] += by
            if choose(shifted)[row] == other:
                return replace(place, ulps=ulps)
    return place


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance from a number of at least 0 to the next one that `dtype` can hold."""
    import torch

    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(value or 1.0))


def _check_repeated(is_same: bool) -> None:
    if not is_same:
        raise CommandError(
            "Plain generate did not write the same text again, so that its logits cannot be "
            "compared. Does this model compute the same call twice with the same result?"
        )
