"""Rotary positions of three planes (M-RoPE): time, row and column, each turning some of the pairs of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.interfaces.multimodal import POSITION_SHIFT
from fwk_layers import RotaryEmbedding, RotaryRows

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class PlaneRotary(RotaryEmbedding):
    """One table of angles, of which each pair has its row by the position in its own plane (arXiv:2409.12191, 2.1).

    sections: how many pairs each plane turns. is_striped: pairs of the planes take turns (Qwen3-VL), where time has
    what rows and columns leave; else one plane's stand behind another's.
    """

    def __init__(self, context: ModelContext, sections: tuple[int, int, int], *, is_striped: bool) -> None:
        super().__init__(context)
        pairs = self.rotary_size // 2
        if sum(sections) != pairs:
            raise ModelLoadError(
                f"config.json: 'mrope_section' is {list(sections)}, and a head has {pairs} pairs of numbers to turn"
            )
        planes = torch.zeros(pairs, dtype=torch.int64)
        if is_striped:
            for plane in (1, 2):
                planes[plane : 3 * sections[plane] : 3] = plane
        else:
            planes = torch.arange(3).repeat_interleave(torch.tensor(sections))
        self.planes = torch.cat((planes, planes)).to(context.device)  # [rotary_size]
        self.columns = torch.arange(self.rotary_size, device=context.device)

    def angles(self, batch: ForwardBatch) -> RotaryRows:
        """Those of a batch's tokens; a step without media looks them up as any model does."""
        shift: Tensor | None = batch.extras.get(POSITION_SHIFT)
        if shift is None:
            return self.rows(batch.positions)
        places = (batch.positions + shift).T[:, self.planes].contiguous()  # [num_tokens, rotary_size]
        cos, sin = (table[:, 0][places, self.columns].unsqueeze(1) for table in (self.cos, self.sin))
        return RotaryRows(cos, sin)


def plane_rotary(context: ModelContext, default: tuple[int, int, int], *, is_striped: bool = False) -> PlaneRotary:
    """As the config says. default: the sections where it does not."""
    rope = cast("Mapping[str, Any]", context.config.raw["rope_parameters"])
    sections = cast("list[Any]", rope.get("mrope_section") or list(default))
    if len(sections) != 3 or not all(isinstance(n, int) and n >= 0 for n in sections):
        raise ModelLoadError(f"config.json: 'mrope_section' must be three numbers of pairs, not {sections!r}")
    time, rows, columns = sections
    return PlaneRotary(context, (time, rows, columns), is_striped=is_striped)
