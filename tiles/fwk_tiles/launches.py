"""What those who launch these functions share on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fwk_tiles.matrices import round_rows

MAX_WIDTH = 1024
"""Numbers of an input that a program rounds at once: eight for each of 128 threads."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and outputs of a program, how many inputs it multiplies at once, and its warps and stages."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


def power_of_two(n: int) -> int:
    """The smallest one that is no less than n."""
    return 1 << (n - 1).bit_length()


def form_of(form: int, groups: int, group_size: int, row_block: int, *, has_zeros: bool) -> dict[str, Any]:
    """The constants by which kernels know a matrix's form. form: its ``FORMAT``."""
    return {"FORMAT": form, "GROUPS": groups, "GROUP": group_size, "ROW_BLOCK": row_block, "HAS_ZEROS": has_zeros}


def rounded_inputs(x: Tensor, groups: int, group: int, launch: Callable[..., None]) -> tuple[Tensor, Tensor]:
    """x [n, columns] as bytes of e4m3 numbers, and float32 scales [n, groups], in one launch.

    launch: gets the kernel, its grid and its arguments, and says whether it is interpreted.
    """
    numbers = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    sizes = {"SIZE": x.shape[1], "GROUPS": groups, "GROUP": group, "WIDTH": min(power_of_two(group), MAX_WIDTH)}
    launch(round_rows, (x.shape[0], groups), x, x.stride(0), numbers, scales, **sizes)
    return numbers, scales
