"""Files of encoded media: the numbers of their rows as bytes, and what kind of numbers they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fwk.interfaces.multimodal import POSITION_PLANES, Media

if TYPE_CHECKING:
    from torch import Tensor

ROWS = "rows"
"""Beginning of the name of a piece's rows among its arrays, before the name of their dtype: [length, bytes of a row]
uint8, as numpy has not all of torch's."""


def write_rows(path: str, rows: Tensor) -> None:
    """Rows of one piece, [length, numbers of a row], to a file of their own."""
    import torch  # noqa: PLC0415 - the server reads such files as bytes

    numbers = rows.detach().to("cpu").contiguous()
    kind = str(numbers.dtype).removeprefix("torch.")
    partial = Path(f"{path}.new")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **{f"{ROWS}.{kind}": numbers.view(torch.uint8).numpy()})
    partial.rename(path)


def gather_rows(target: Path, media: Sequence[Media], files: Sequence[Path]) -> list[Media]:
    """One payload of the rows of a prompt's media, and of their positions: the media that refer to it.

    files: of each piece, its rows.
    """
    arrays: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        made = {path: stack.enter_context(np.load(path, allow_pickle=False)) for path in {x.payload for x in media}}
        for i, (item, path) in enumerate(zip(media, files, strict=True)):
            with np.load(path, allow_pickle=False) as file:
                arrays |= {f"{i}.{name}": file[name] for name in file.files}
            planes = f"{item.index}.{POSITION_PLANES}"
            if planes in made[item.payload].files:
                arrays[f"{i}.{POSITION_PLANES}"] = made[item.payload][planes]
    np.savez(target, allow_pickle=False, **arrays)
    return [
        Media(item.key, item.kind, item.start, item.length, str(target), i, item.is_span)
        for i, item in enumerate(media)
    ]


def read_rows(file: Any, index: int) -> Tensor | None:
    """Rows of a piece of an opened payload, [length, numbers of a row] on the host; None: it has none."""
    import torch  # noqa: PLC0415

    prefix = f"{index}.{ROWS}."
    name = next((name for name in file.files if name.startswith(prefix)), None)
    if name is None:
        return None
    return torch.from_numpy(file[name]).view(getattr(torch, name.removeprefix(prefix)))
