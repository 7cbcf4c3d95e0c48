"""The served model's tokeniser and templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fwk.config import ModelOptions
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.dialect import TextTools
from fwk.interfaces.loader import Checkpoint
from fwk.text.chat_template import ChatTemplate
from fwk.text.detokenizer import SequenceText
from fwk.text.vocabulary import Vocabulary
from fwk.types import SamplingParams


class ModelText(TextTools):
    """Tokenises, detokenises and renders for one model."""

    def __init__(self, checkpoint: Checkpoint, options: ModelOptions, vocab_size: int) -> None:
        self.tokenizer = _tokenizer(checkpoint, options)
        if self.tokenizer.get_vocab_size() > vocab_size:
            raise ModelLoadError(
                f"{checkpoint.path}: the tokenizer has {self.tokenizer.get_vocab_size()} tokens, "
                f"the model only {vocab_size}: they do not belong together"
            )
        # A second one for text in which nothing is special: the setting belongs to the tokenizer object.
        self._literal = Tokenizer.from_str(self.tokenizer.to_str())
        self._literal.encode_special_tokens = True
        self.vocabulary = Vocabulary(self.tokenizer)
        special = _special_tokens(checkpoint.tokenizer_config())
        source = _read(options.chat_template) if options.chat_template else checkpoint.chat_template()
        self._template = ChatTemplate(source, special) if source else None

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        tokenizer = self.tokenizer if parse_special else self._literal
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("the text is not valid Unicode (lone surrogates)", "prompt") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
            )
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    def follow(self, sampling: SamplingParams) -> SequenceText:
        """A detokeniser for one new sequence."""
        return SequenceText(self.tokenizer, self.vocabulary, sampling)


def _tokenizer(checkpoint: Checkpoint, options: ModelOptions) -> Tokenizer:
    if not options.tokenizer_path:
        return checkpoint.tokenizer()
    path = Path(options.tokenizer_path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelLoadError(f"--tokenizer-path: there is no {file}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelLoadError(f"--tokenizer-path: {file} is damaged: {error}") from None


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"--chat-template: cannot read {path}: {error}") from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, as text; tokenizer_config.json has them as strings or as objects."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
