"""Serving without a tokenizer: token ids in, token ids out (``--skip-tokenizer-init``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fwk.config import ModelOptions
from fwk.errors import InvalidRequest
from fwk.interfaces.loader import Checkpoint
from fwk.text.detokenizer import SequenceText
from fwk.text.model_text import ModelText
from fwk.text.prompt_limits import PromptLimits
from fwk.types import SamplingParams

WHY = "this server has no tokenizer (--skip-tokenizer-init)"


class TokenIdsOnly(ModelText):
    """Refuses all that needs text, with a sentence."""

    has_tokenizer = False

    def __init__(self, options: ModelOptions) -> None:
        self.limits = PromptLimits.of(options)
        self.chat_template = ""
        self.shows_tools = False
        self.renders_pairs = False

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Refuse it."""
        raise InvalidRequest(f"{WHY}: give token ids instead of text", "prompt")

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Refuse it."""
        raise InvalidRequest(f"{WHY}: give token ids instead of text")

    def min_num_tokens(self, text: str) -> int:
        """Nobody can tell."""
        return 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Refuse it."""
        raise InvalidRequest(f"{WHY}: it cannot turn token ids into text")

    def token_bytes(self, token_id: int) -> bytes:
        """The id in words, as log-probabilities need some name of each token."""
        return b"token_id:%d" % token_id

    def infill(self, before: str, after: str, files: Sequence[tuple[str, str]] = (), start: str = "") -> NoReturn:
        """Refuse it."""
        raise InvalidRequest(f"{WHY}: it completes token ids, and fills in no text")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse it."""
        raise InvalidRequest(f"{WHY}: it cannot render messages; send token ids to /v1/completions", "messages")

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> NoReturn:
        """Refuse it."""
        self.render_chat(messages)

    def follow(self, sampling: SamplingParams) -> SequenceText:
        """Counts tokens, and watches for repetitions."""
        return SequenceText(None, None, sampling)


def model_text(checkpoint: Checkpoint, options: ModelOptions, vocab_size: int) -> ModelText:
    """The text tools that the options ask for. Raises ``ModelLoadError``."""
    return TokenIdsOnly(options) if options.skip_tokenizer_init else ModelText(checkpoint, options, vocab_size)
