"""The served model's tokeniser and templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fwk.config import ModelOptions
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.dialect import Infill, TextTools
from fwk.interfaces.loader import Checkpoint
from fwk.text.detokenizer import SequenceText
from fwk.text.prompt_limits import PromptLimits
from fwk.types import SamplingParams
from fwk_files.regular import read_text
from fwk_jinja.chat import ChatTemplate
from fwk_tokenizer.check import check_tokenizer
from fwk_tokenizer.files import read_tokenizer
from fwk_tokenizer.growth import GrowthLimit
from fwk_tokenizer.infill import infill_template
from fwk_tokenizer.special import Marks, special_tokens
from fwk_tokenizer.vocabulary import Vocabulary

MAX_TEMPLATE_BYTES = 4 * 2**20
"""Of a chat template, as loaders bound those of checkpoints."""


class ModelText(TextTools):
    """Tokenises, detokenises and renders for one model."""

    def __init__(self, checkpoint: Checkpoint, options: ModelOptions, vocab_size: int) -> None:
        self.tokenizer = read_tokenizer(checkpoint, options)
        check_tokenizer(self.tokenizer, options.tokenizer_path or checkpoint.path)
        self._growth = GrowthLimit(self.tokenizer)
        # A tokenizer.json may carry the padding and truncation of whoever saved it: here a text is its own tokens, all.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if self.tokenizer.get_vocab_size() > vocab_size:
            raise ModelLoadError(
                f"{checkpoint.path}: the tokenizer has {self.tokenizer.get_vocab_size()} tokens, "
                f"the model only {vocab_size}: they do not belong together"
            )
        self.limits = PromptLimits.of(options)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.special_ids = self.vocabulary.special_ids
        special = special_tokens(checkpoint.tokenizer_config())
        source = _read(options.chat_template) if options.chat_template else checkpoint.chat_template()
        self.chat_template = source or ""
        self._template = ChatTemplate(source, special) if source else None
        self.shows_tools = self._template is not None and self._template.shows_tools()
        self._infill = infill_template(options.completion_template, self.tokenizer, self)
        self.renders_pairs = all(re.search(f"""["']{role}["']""", self.chat_template) for role in ("query", "document"))

    @cached_property
    def _literal(self) -> Tokenizer:
        """A second tokenizer for text in which nothing is special: the setting belongs to the object.

        Few texts hold anything that could be special, so most processes never make it.
        """
        literal = Tokenizer.from_str(self.tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal

    def prepare(self) -> None:
        """Find out now what the first request would wait for."""
        self.min_num_tokens("")

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        tokenizer = self.tokenizer if parse_special else self._literal
        try:
            self._growth.check(text)
            # Not ``encode``, which keeps the GIL: megabytes of text would stop the event loop for seconds.
            return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("the text is not valid Unicode (lone surrogates)", "prompt") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library: no ``Exception``, and nowhere to import it
                raise
            raise InvalidRequest("the model's tokenizer takes too long to split this text", "prompt") from None

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        try:
            for text in (first, second):
                self._growth.check(text)
            found = self._literal.encode_batch([(first, second)])[0]
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("the text is not valid Unicode (lone surrogates)") from None
        kinds = found.type_ids
        return found.ids, kinds.index(1) if 1 in kinds else 0

    def min_num_tokens(self, text: str) -> int:
        most = self.vocabulary.max_characters
        return -(-len(text) // most) if most is not None else 0

    def check_fits(self, text: str, max_num_tokens: int, param: str) -> None:
        if self.limits.truncation == "none":
            super().check_fits(text, max_num_tokens, param)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def infill(self, before: str, after: str, files: Sequence[tuple[str, str]] = (), start: str = "") -> Infill:
        if self._infill is None:
            return super().infill(before, after, files, start)
        return Infill(*self._infill.make(before, after, files, start))

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes(token_id)

    def all_bytes(self, vocab_size: int) -> list[bytes]:
        return self.vocabulary.all_bytes(vocab_size)

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

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_num_tokens: int | None = None,
    ) -> list[int]:
        marks = Marks(self.vocabulary.special_texts)
        prompt = self.render_chat(
            marks.put(list(messages)),
            tools=marks.put(list(tools)) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=marks.put(dict(kwargs)) if kwargs else None,
        )
        ids: list[int] = []
        parts = marks.split(prompt)
        if max_num_tokens is not None:
            self.check_fits("".join(part for part, _ in parts), max_num_tokens, "messages")
        for i, (part, is_literal) in enumerate(parts):
            ids += self.encode(part, add_special_tokens=add_special_tokens and i == 0, parse_special=not is_literal)
        return ids

    def follow(self, sampling: SamplingParams) -> SequenceText:
        """A detokeniser for one new sequence."""
        return SequenceText(self.tokenizer, self.vocabulary, sampling)


def _read(path: str) -> str:
    try:
        return read_text(Path(path).expanduser(), MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"--chat-template: cannot read {path}: {why}") from None
