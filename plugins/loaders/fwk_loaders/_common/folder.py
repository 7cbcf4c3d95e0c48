"""A Hugging Face style folder: config.json and the files beside it, all but the weights.

The folder is not trusted: nothing in it is executed (``auto_map`` is ignored), and sizes are checked before reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_JSON_BYTES = 64 * 2**20
MAX_TOKENIZER_BYTES = 512 * 2**20
MAX_TEMPLATE_BYTES = 4 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ModelLoadError`` naming the file when it is missing, damaged or something else."""
    text = _read(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise ModelLoadError(f"{path}: larger than {max_bytes // 2**20} MiB, which no such file is")
    return content


class ModelFolder:
    """Reads the files of one folder, each when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_json(self.path / "config.json")

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json; empty when there is none."""
        return self._optional("generation_config.json")

    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json."""
        return (self.path / "tokenizer.json").exists()

    def tokenizer(self) -> Tokenizer:
        """tokenizer.json. Raises ``ModelLoadError`` when it is missing or damaged."""
        path = self.path / "tokenizer.json"
        if not path.exists():
            other = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (self.path / name).exists()]
            hint = f" ({other[0]} is there, but cannot be read)" if other else ""
            raise ModelLoadError(
                f"{path}: missing{hint}. Make it with transformers: AutoTokenizer.from_pretrained(FOLDER)"
                ".save_pretrained(FOLDER), or give one with --tokenizer-path"
            )
        from tokenizers import Tokenizer  # noqa: PLC0415 - only who tokenises needs it

        try:
            return Tokenizer.from_buffer(_read(path, MAX_TOKENIZER_BYTES))
        except ModelLoadError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path}: not a tokeniser ({error}); fetch the file again") from error

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json with special tokens as plain text; empty when there is none."""
        config = self._optional("tokenizer_config.json")
        for name, value in config.items():
            if name.endswith("_token") and isinstance(value, dict) and isinstance(value.get("content"), str):
                config[name] = value["content"]
        return config

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the one in tokenizer_config.json or chat_template.json."""
        path = self.path / "chat_template.jinja"
        if path.exists():
            try:
                return _read(path, MAX_TEMPLATE_BYTES).decode()
            except UnicodeDecodeError as error:
                raise ModelLoadError(f"{path}: not UTF-8 text ({error})") from error
        for name in ("tokenizer_config.json", "chat_template.json"):
            template = self._optional(name).get("chat_template")
            if template is not None:
                return _pick(self.path / name, template)
        return None

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_json(path) if path.exists() else {}


def _pick(path: Path, template: object) -> str:
    """``chat_template`` is one template, or a list of named ones of which ``default`` is meant."""
    if isinstance(template, str):
        return template
    items = template if isinstance(template, list) else []
    named = {item.get("name"): item.get("template") for item in items if isinstance(item, Mapping)}
    found = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if not isinstance(found, str):
        names = ", ".join(map(str, named)) or "none"
        raise ModelLoadError(
            f"{path}: chat_template has no 'default' (found: {names}); give one with --chat-template FILE"
        )
    return found
