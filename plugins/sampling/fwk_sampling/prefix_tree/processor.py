"""Masks all but the tokens that the tree has after what was generated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fwk.errors import ConfigError
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_files.regular import read_regular
from fwk_sampling._common.rows import asked_rows, entries, require_token

TokenId = Annotated[int, Field(ge=0)]


class TreeFile(BaseModel):
    """The file: ``prefix_dict`` has, by the ids of a prefix joined by ``sep``, first the start's, what may follow."""

    model_config = ConfigDict(extra="forbid", strict=True)

    start_token_id: TokenId
    end_token_id: TokenId
    sep: str = Field("_", min_length=1, pattern=r"^[^0-9]+$")
    prefix_dict: dict[str, Annotated[list[TokenId], Field(min_length=1)]] = Field(min_length=1)


class PrefixTree(LogitsProcessor):
    """Takes part in every request: outputs begin at the start, whatever the prompt ends with.

    After what the tree does not go on from, only the end is allowed.
    """

    only_masks = True

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._asked: dict[int, bool] = {}
        path = context.options.tree_decode_config
        file = _read(path)
        _check(file, path, context)
        self._start, self._sep = str(file.start_token_id), file.sep
        self._end = np.array([file.end_token_id], np.int64)
        self._allowed = {prefix: np.unique(np.array(ids, np.int64)) for prefix, ids in file.prefix_dict.items()}
        self._depth = max(prefix.count(file.sep) for prefix in self._allowed)

    def add(self, slot: int, params: SamplingParams) -> bool:
        self._asked[slot] = True
        return True

    def remove(self, slot: int) -> None:
        del self._asked[slot]

    def after(self, generated: np.ndarray) -> np.ndarray:
        """Generated tokens [n] int32 to the ids [m] int64 that may follow."""
        if len(generated) > self._depth:
            return self._end
        return self._allowed.get(self._sep.join([self._start, *map(str, generated.tolist())]), self._end)

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        parts: list[tuple[int, np.ndarray]] = []
        for row, _ in asked_rows(self._asked, view):
            begin, end = int(view.num_prompt_tokens[row]), int(view.num_tokens[row])
            parts.append((row, self.after(view.token_ids[view.slots[row], begin:end])))
        rows = [row for row, _ in parts]
        index = entries(parts, self.context)
        kept = logits[index]
        logits.index_fill_(0, self.context.send(np.array(rows, np.int64)), -torch.inf)
        logits.index_put_(index, kept)
        require_token(logits, rows, view, "the tree of --tree-decode-config", self.context)
        return logits


def _read(path: str) -> TreeFile:
    try:
        return TreeFile.model_validate_json(read_regular(Path(path).expanduser()))
    except OSError as error:
        raise ConfigError(f"--tree-decode-config {path}: {error.strerror or error}") from None
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--tree-decode-config {path}: {f'{where}: ' if where else ''}{first['msg']}") from None


def _check(file: TreeFile, path: str, context: SamplingContext) -> None:
    """Raise ``ConfigError`` for a tree that this model cannot follow."""
    begin = f"--tree-decode-config {path}: "
    if str(file.start_token_id) not in file.prefix_dict:
        raise ConfigError(f"{begin}prefix_dict has nothing for the start, the prefix '{file.start_token_id}'")
    if file.end_token_id not in context.eos_token_ids:
        known = ", ".join(map(str, context.eos_token_ids)) or "none"
        raise ConfigError(
            f"{begin}end_token_id {file.end_token_id} does not end an output of this model: {known} would"
        )
    for prefix, ids in file.prefix_dict.items():
        parts = prefix.split(file.sep)
        if parts[0] != str(file.start_token_id) or not all(part.isdecimal() for part in parts):
            raise ConfigError(
                f"{begin}the prefix '{prefix}' is not token ids joined by '{file.sep}', of which the first is the "
                f"start, {file.start_token_id}"
            )
        if max(ids) >= context.vocab_size:
            raise ConfigError(f"{begin}token {max(ids)} after '{prefix}': the model has {context.vocab_size} tokens")
