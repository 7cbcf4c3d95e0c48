"""How a folder of sentence-transformers says that hidden states become an embedding."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fwk.errors import ModelLoadError
from fwk.interfaces.pooling import PoolingConfig
from fwk_loaders._common.json_file import MAX_JSON_BYTES, read_bytes, read_json

MODULES = "modules.json"
_KINDS: dict[str, Literal["mean", "cls", "last"]] = {
    "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"
}  # fmt: skip


def read_pooling(folder: Path) -> PoolingConfig | None:
    """Read modules.json: a transformer, one pooling, perhaps a normalisation. None when there is no such file.

    Raises ``ModelLoadError`` for a damaged file and for modules nobody here computes.
    """
    path = folder / MODULES
    if not path.exists():
        return None
    names = _modules(path)
    kinds = [name for name, _ in names]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelLoadError(
            f"{path}: the modules {', '.join(kinds) or 'of none'} are not known as a row; a transformer, a pooling and "
            "a normalisation are"
        )
    settings = folder / "sentence_bert_config.json"
    longest = read_json(settings).get("max_seq_length") if settings.exists() else None
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise ModelLoadError(f"{settings}: 'max_seq_length' must be a number of tokens, not {longest!r}")
    kind = _pooling_kind(folder / names[1][1] / "config.json")
    return PoolingConfig(kind, normalize=len(names) == 3, max_length=longest)


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module, in their order."""
    try:
        items: Any = json.loads(read_bytes(path, MAX_JSON_BYTES))
        found = [(str(item["type"]).rpartition(".")[2], str(item["path"])) for item in items]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: not a list of modules ({error}); fetch the file again") from error
    for _, folder in found:
        pure = PurePosixPath(folder)
        if pure.is_absolute() or ".." in pure.parts:  # the file is not trusted
            raise ModelLoadError(f"{path}: {folder!r} is not the name of a folder next to it")
    return found


def _pooling_kind(path: Path) -> Literal["mean", "cls", "last"]:
    config = read_json(path)
    named = config.get("pooling_mode")
    if named is None:
        chosen = [
            key.removeprefix("pooling_mode_") for key, value in config.items() if value is True and "_mode_" in key
        ]
        named = chosen[0] if len(chosen) == 1 else " and ".join(chosen)
    kind = _KINDS.get(str(named))
    if kind is None:
        raise ModelLoadError(f"{path}: pooling by {named or 'nothing'} is not known; mean, cls and lasttoken are")
    return kind
