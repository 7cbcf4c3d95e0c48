"""A Hugging Face style folder: config.json and the files next to it, all but the weights.

The folder is not trusted: nothing in it is executed (``auto_map`` is ignored), and sizes are checked before reading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.pooling import PoolingConfig
from fwk_loaders._common.json_file import read_bytes, read_json
from fwk_loaders._common.pooling import read_pooling
from fwk_loaders._common.templates import WITH_TOOLS, joined
from fwk_loaders._common.tokens import add_tokens
from fwk_tokenizer.bounds import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENIZER_BYTES = 128 * 2**20
DECODER_STARTS = ("decoder_start_token_id", "forced_bos_token_id")
"""Fields of generation_config.json that config.json has in older checkpoints."""
MAX_TEMPLATE_BYTES = 4 * 2**20


class ModelFolder:
    """Reads the files of one folder, each when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> dict[str, Any]:
        """config.json, with what hf_quant_config.json alone says of how weights are stored, as ModelOpt writes it."""
        found = read_json(self.path / "config.json")
        stored = self._optional("hf_quant_config.json").get("quantization")
        if isinstance(stored, dict) and not found.get("quantization_config"):
            found["quantization_config"] = {"quant_method": "modelopt", **stored}
        generation = self._optional("generation_config.json")
        return found | {name: generation[name] for name in DECODER_STARTS if generation.get(name) is not None}

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, with the tokenizer's ``eos_token`` among what ends an answer.

        Older checkpoints have no such file: then config.json holds its fields, as transformers reads it.
        """
        name, token_id = "generation_config.json", self._end_token
        found = read_json(self.path / (name if (self.path / name).exists() else "config.json"))
        if token_id is not None:
            given = found.get("eos_token_id")
            ids = given if isinstance(given, list) else [] if given is None else [given]
            found["eos_token_id"] = [*ids, *([] if token_id in ids else [token_id])]
        return found

    @cached_property
    def _end_token(self) -> int | None:
        """The id of ``eos_token``: mostly it is among the added tokens, which are found without the vocabulary."""
        config = self.tokenizer_config()
        token, listed = config.get("eos_token"), config.get("added_tokens_decoder")
        if not isinstance(token, str):
            return None
        for token_id, item in (listed if isinstance(listed, dict) else {}).items():
            if isinstance(item, dict) and item.get("content") == token and str(token_id).isdecimal():
                return int(token_id)
        if not self.has_tokenizer():
            return None
        text = read_bytes(self.path / "tokenizer.json", MAX_TOKENIZER_BYTES).decode(errors="replace")
        found = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
        try:
            added = json.JSONDecoder().raw_decode(text, found.end())[0] if found else []
        except (ValueError, RecursionError):
            added = []
        ids = [item.get("id") for item in added if isinstance(item, dict) and item.get("content") == token]
        return ids[0] if ids and isinstance(ids[0], int) else self.tokenizer().token_to_id(token)

    def processor_config(self) -> dict[str, Any]:
        """preprocessor_config.json, and processor_config.json with the fields of its parts; empty without either.

        What is said of videos is ``video_processor``, from there or video_preprocessor_config.json.
        """
        found = self._optional("processor_config.json")
        videos = found.pop("video_processor", None) or self._optional("video_preprocessor_config.json")
        for name in [name for name, value in found.items() if name.endswith("_processor") and isinstance(value, dict)]:
            found |= found.pop(name)
        return found | self._optional("preprocessor_config.json") | ({"video_processor": videos} if videos else {})

    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json."""
        return (self.path / "tokenizer.json").exists()

    def tokenizer(self) -> Tokenizer:
        """tokenizer.json. Raises ``ModelLoadError`` when it is missing or damaged."""
        path = self.path / "tokenizer.json"
        if not path.exists():
            raise ModelLoadError(
                f"{path}: missing. Make it with transformers: AutoTokenizer.from_pretrained(FOLDER)"
                ".save_pretrained(FOLDER), or give one with --tokenizer-path"
            )
        tokenizer = load_tokenizer(read_bytes(path, MAX_TOKENIZER_BYTES), path)
        add_tokens(tokenizer, self.tokenizer_config(), self._optional("added_tokens.json"))
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json with special tokens as plain text, or as special_tokens_map.json alone has them."""
        config = self._optional("tokenizer_config.json")
        for name, value in self._optional("special_tokens_map.json").items():
            config.setdefault(name, value)
        for name, value in config.items():
            if name.endswith("_token") and isinstance(value, dict) and isinstance(value.get("content"), str):
                config[name] = value["content"]
        return config

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the one in tokenizer_config.json or chat_template.json.

        Where another one is named ``tool_use``, the two in one.
        """
        path = self.path / "chat_template.jinja"
        if path.exists():
            more = self.path / "additional_chat_templates" / f"{WITH_TOOLS}.jinja"
            return joined(_template(path), _template(more) if more.exists() else None)
        for name in ("tokenizer_config.json", "chat_template.json"):
            template = self._optional(name).get("chat_template")
            if template is not None:
                return _pick(self.path / name, template)
        return None

    def pooling(self) -> PoolingConfig | None:
        """modules.json and what it names, as sentence-transformers writes them; None when there is none."""
        return read_pooling(self.path)

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_json(path) if path.exists() else {}


class FolderCheckpoint(Checkpoint):
    """A checkpoint of which everything but the weights is in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = ModelFolder(path)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._folder.config()

    @property
    def _quantization(self) -> dict[str, Any]:
        """``quantization_config`` of config.json; empty when there is none."""
        found = self._config.get("quantization_config")
        return found if isinstance(found, dict) else {}

    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self._config

    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json; empty when there is none."""
        return self._folder.generation_config()

    def processor_config(self) -> Mapping[str, Any]:
        """preprocessor_config.json and processor_config.json; empty without either."""
        return self._folder.processor_config()

    def tokenizer(self) -> Tokenizer:
        """tokenizer.json."""
        return self._folder.tokenizer()

    def tokenizer_config(self) -> Mapping[str, Any]:
        """tokenizer_config.json; empty when there is none."""
        return self._folder.tokenizer_config()

    def chat_template(self) -> str | None:
        """chat_template.jinja or the one in tokenizer_config.json."""
        return self._folder.chat_template()

    def pooling(self) -> PoolingConfig | None:
        """The folder's."""
        return self._folder.pooling()


def _template(path: Path) -> str:
    try:
        return read_bytes(path, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: not UTF-8 text ({error})") from error


def _pick(path: Path, template: object) -> str:
    """``chat_template`` is one template, or a list of named ones: ``default``, and ``tool_use`` for tools."""
    if isinstance(template, str):
        return template
    items = template if isinstance(template, list) else []
    named = {item.get("name"): item.get("template") for item in items if isinstance(item, Mapping)}
    found = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if not isinstance(found, str):
        names = ", ".join(f"{name!s:.40}" for name in [*named][:8]) or "none"
        raise ModelLoadError(
            f"{path}: chat_template has no 'default' (found: {names}); give one with --chat-template FILE"
        )
    with_tools = named.get(WITH_TOOLS)
    return joined(found, with_tools if isinstance(with_tools, str) else None)
