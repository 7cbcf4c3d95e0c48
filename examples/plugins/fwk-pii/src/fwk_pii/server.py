"""A filter of requests: a feature with a part in the server alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, OutputDelta
from fwk.interfaces.feature import RequestPart, ServerPart, ServerPartContext
from fwk_pii import PiiOptions
from fwk_pii.patterns import Redactor

LONG = 2000
"""Tokens of a prompt that are looked at in a thread, as it takes milliseconds."""


class PiiFilter(ServerPart):
    """Has a part in every request."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        options: PiiOptions = context.options
        self.redactor = Redactor(options.pii_kinds)
        self.in_prompts, self.in_replies = options.pii_sides != "replies", options.pii_sides != "prompts"
        self._is_special: dict[int, bool] = {}

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart:
        return Redacted(self) if self.in_replies and isinstance(item, GenerateInput) else RedactedPrompt(self)

    def prompt(self, token_ids: list[int]) -> list[int]:
        """The prompt without personal data: the same list where it has none. The marks of a chat stay as they are."""
        text, found, changed = self.context.text, list[int](), False
        for run, is_special in self._runs(token_ids):
            if not is_special:
                before = text.decode(run, skip_special_tokens=False)
                after = self.redactor.redact(before)
                if after != before:
                    run, changed = text.encode(after, add_special_tokens=False, parse_special=False), True
            found += run
        return found if changed else token_ids

    def _runs(self, token_ids: list[int]) -> list[tuple[list[int], bool]]:
        """The tokens in runs of text, and of special ones."""
        runs: list[tuple[list[int], bool]] = []
        for token in token_ids:
            is_special = self._special(token)
            if not runs or runs[-1][1] != is_special:
                runs.append(([], is_special))
            runs[-1][0].append(token)
        return runs

    def _special(self, token: int) -> bool:
        known = self._is_special.get(token)
        if known is None:
            decode = self.context.text.decode
            known = self._is_special[token] = not decode([token]) and bool(decode([token], skip_special_tokens=False))
        return known


class RedactedPrompt(RequestPart):
    """One request, whose prompt is redacted."""

    def __init__(self, own: PiiFilter) -> None:
        self._own = own

    async def check(self, item: Any) -> Any:
        own, name = self._own, "token_ids" if isinstance(item, EmbedInput) else "prompt_token_ids"
        if not own.in_prompts or not own.context.text.has_tokenizer:
            return item
        before: list[int] = getattr(item, name)
        frontend = own.context.frontend
        is_long = frontend is not None and len(before) > LONG
        after = await frontend.run_blocking(own.prompt, before) if is_long and frontend else own.prompt(before)
        if after is before:
            return item
        if getattr(item, "media", ()) or getattr(item, "segment_start", 0):
            raise InvalidRequest("personal data cannot be taken out of a prompt with images, or of a pair of texts")
        return replace(item, **{name: after})


class Redacted(RedactedPrompt):
    """One whose reply is redacted, too: a word is sent when the next one has begun, for it may be part of more."""

    def __init__(self, own: PiiFilter) -> None:
        super().__init__(own)
        self._kept: dict[int, str] = {}  # by sequence: what is not sent yet
        self._last: dict[int, str] = {}  # and the character before it

    async def check(self, item: Any) -> Any:
        if item.sampling.logprobs is not None or item.sampling.prompt_logprobs is not None:
            raise InvalidRequest("log-probabilities would show what this server redacts in replies", "logprobs")
        return await super().check(item)

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        redactor, last = self._own.redactor, self._last.get(delta.index, "")
        text = self._kept.pop(delta.index, "") + delta.text
        end = len(text) if delta.finish_reason is not None else redactor.open_end(text)
        self._kept[delta.index] = text[end:]
        self._last[delta.index] = (last + text[:end])[-1:]
        return replace(delta, text=redactor.redact(last + text[:end])[len(last) :], token_ids=[])
