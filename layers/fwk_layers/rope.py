"""Rotary position embedding: rotates halves of each head by angles that grow with the position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import RopeConfig


class RotaryRows(NamedTuple):
    """Angles of one step's tokens, the same for all layers: [num_tokens, 1, rotary_size] each."""

    cos: Tensor
    sin: Tensor  # of the first half negated


class RotaryEmbedding:
    """One table of angles for all layers that turn alike, in float32, long enough for ``max_model_len``.

    rope: the config's ``rope`` unless given. is_interleaved: pairs to turn are neighbours (2i, 2i + 1) instead of
    halves (i, i + size / 2); ``rotate`` then leaves them as halves, which is the same to a product of Q and K.
    """

    def __init__(
        self,
        context: ModelContext,
        head_size: int | None = None,
        *,
        rope: RopeConfig | None = None,
        is_interleaved: bool = False,
    ) -> None:
        config = context.config
        rope = config.rope if rope is None else rope
        size = config.head_size if head_size is None else head_size
        self.is_interleaved = is_interleaved
        partial = rope.scaling.get("partial_rotary_factor") or config.raw.get("partial_rotary_factor") or 1.0
        self.head_size, self.rotary_size = size, int(size * float(partial))
        self.operators = context.operators
        frequencies, factor = inverse_frequencies(
            _for_length(rope, context), self.rotary_size, config.max_position_embeddings
        )
        positions = torch.arange(context.max_model_len, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        place = {"device": context.device, "dtype": context.dtype}
        self.cos = torch.cat((cos, cos), -1).unsqueeze(1).to(**place)  # [max_model_len, 1, rotary_size]
        self.sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(**place)

    def rows(self, positions: Tensor) -> RotaryRows:
        """The angles at ``positions`` [num_tokens]; once a step."""
        return RotaryRows(self.operators.rows(self.cos, positions), self.operators.rows(self.sin, positions))

    @property
    def is_whole(self) -> bool:
        """Whether it turns all numbers of a head, as halves."""
        return self.rotary_size == self.head_size and not self.is_interleaved

    def rotate(self, x: Tensor, rows: RotaryRows) -> Tensor:
        """Rotate the heads of x [num_tokens, num_heads, head_size] in place, and return it."""
        if self.is_interleaved:
            part = x[..., : self.rotary_size]
            part.copy_(part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
        self.operators.rotate(x, rows.cos, rows.sin)
        return x


def inverse_frequencies(rope: RopeConfig, size: int, max_positions: int) -> tuple[Tensor, float]:
    """Angles per position [size / 2] in float32, and a factor on cos and sin.

    Raises ``ModelLoadError`` for a kind of scaling that is not known, or one whose settings are incomplete.
    """
    base = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    settings = rope.scaling
    match rope.kind:
        case "default":
            return base, 1.0
        case "linear":
            return base / _setting(settings, "linear", "factor"), 1.0
        case "llama3":
            return _llama3(base, settings), 1.0
        case "yarn":
            return _yarn(base, rope, size, max_positions)
        case "longrope":
            return _longrope(base, settings, max_positions)
        case _:
            raise ModelLoadError(
                f"rope scaling {rope.kind!r} is not known; this fwk computes default, linear, llama3, yarn, longrope "
                "and, up to the model's own length, dynamic"
            )


def _for_length(rope: RopeConfig, context: ModelContext) -> RopeConfig:
    """Angles that depend on how long sequences are, settled for ``max_model_len``: one table serves all of them.

    Raises ``ModelLoadError`` for dynamic scaling beyond the model's own length, which changes with each sequence.
    """
    config = context.config
    original = rope.scaling.get("original_max_position_embeddings") or config.raw.get(
        "original_max_position_embeddings"
    )
    if rope.kind in ("longrope", "su"):
        original = int(original or config.max_position_embeddings)
        name = "long_factor" if context.max_model_len > original else "short_factor"
        factors = rope.scaling.get(name)
        if not isinstance(factors, list) or not factors:
            raise ModelLoadError(f"rope scaling 'longrope' needs a list for {name!r}, config.json has {factors!r}")
        chosen = {"factors": factors, "original_max_position_embeddings": original}
        return replace(rope, kind="longrope", scaling={**rope.scaling, **chosen})
    if rope.kind == "dynamic":
        longest = int(original or config.max_position_embeddings)
        if context.max_model_len > longest:
            raise ModelLoadError(
                f"rope scaling 'dynamic' changes with each sequence beyond {longest} tokens: set --context-length "
                f"{longest}"
            )
        return replace(rope, kind="default")
    return rope


def _longrope(base: Tensor, settings: Mapping[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753): a factor for each wave, and a temperature on attention."""
    factors = torch.tensor(settings["factors"], dtype=torch.float32)
    if factors.shape != base.shape:
        raise ModelLoadError(f"rope scaling 'longrope' has {len(factors)} factors for {len(base)} angles")
    given, original = settings.get("attention_factor"), float(settings["original_max_position_embeddings"])
    stretch = float(settings.get("factor") or max_positions / original)
    temperature = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return base / factors, temperature if given is None else float(given)


def _setting(settings: Mapping[str, Any], kind: str, name: str) -> float:
    value = settings.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise ModelLoadError(f"rope scaling {kind!r} needs a positive number for {name!r}, config.json has {value!r}")
    return float(value)


def _llama3(base: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high, original = (
        _setting(settings, "llama3", name)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = original * base / (2 * math.pi)  # of each wave over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return base * kept + base / factor * (1 - kept)


def _yarn(base: Tensor, rope: RopeConfig, size: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): a ramp between stretched and kept waves, and a temperature on attention."""
    settings = rope.scaling
    original = float(settings.get("original_max_position_embeddings") or max_positions)
    factor = _setting(settings, "yarn", "factor") if settings.get("factor") else max_positions / original

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(float(settings.get("beta_fast") or 32))
    high = dimension(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)
    frequencies = base / factor * stretched + base * (1 - stretched)

    given, mscale, mscale_all = (settings.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return frequencies, float(given)
    if mscale and mscale_all:
        return frequencies, yarn_temperature(factor, float(mscale)) / yarn_temperature(factor, float(mscale_all))
    return frequencies, yarn_temperature(factor, 1.0)


def yarn_temperature(factor: float, mscale: float) -> float:
    """What YaRN multiplies queries and keys with when positions are stretched ``factor`` times."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
