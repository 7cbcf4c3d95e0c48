"""The following of a sequence on its way; for ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fwk.errors import InvalidRequest, RequestFailed
from fwk.features.server import RequestFeatures
from fwk.interfaces.completion import Completion
from fwk.interfaces.dialect import OutputDelta, joined_reply
from fwk.text import SequenceText
from fwk.types import TokenEvent
from fwk_offline.parts import at_once

Key = tuple[str, int]
"""A sequence: its request's id, and its number among the request's sequences."""


@dataclass(slots=True)
class Following:
    """A sequence on its way."""

    completion: Completion
    text: SequenceText
    parts: RequestFeatures | None = None
    """Of features; None where none has to do with it. They are told of the end once all sequences have been left."""

    def take(self, event: TokenEvent, abort: Callable[[], object]) -> bool:
        """Take in an event of it; returns whether it has ended. ``abort`` is called when a stop string ends it.

        Raises what the engine says went wrong.
        """
        try:
            has_ended = self._take(event, abort)
        except (InvalidRequest, RequestFailed):
            self.leave()
            raise
        if has_ended:
            self.leave()
        return has_ended

    def leave(self) -> None:
        """Nothing more comes of it."""
        parts, self.parts = self.parts, None
        if parts is not None:
            parts.leave()

    def _take(self, event: TokenEvent, abort: Callable[[], object]) -> bool:
        done = self.completion
        text, count = self.text.feed(event)
        token_ids, has_ended = event.token_ids[:count], False
        logprobs = None if event.logprobs is None else event.logprobs[:count]
        if self.parts is not None and self.parts.changes_output:
            reason = "stop" if self.text.stop_string is not None else event.finish_reason
            delta = OutputDelta(
                event.index,
                text,
                token_ids,
                reason,
                logprobs=logprobs,
                num_output_tokens=len(done.token_ids) + count,
                num_cut=len(event.token_ids) - count,
                features=event.features,
            )
            delta = at_once(self.parts.output(delta))
            text, token_ids, logprobs = delta.text, delta.token_ids, delta.logprobs
            done.features = joined_reply(done.features, delta.reply)
            done.hidden_states += delta.hidden_states or ()
            done.prompt_logprobs = done.prompt_logprobs or delta.prompt_logprobs
            done.vector = delta.vector
            has_ended = delta.finish_reason is not None and reason is None
            if has_ended:
                done.finish_reason, done.stop_reason = delta.finish_reason, delta.stop_reason
        done.text += text
        done.token_ids.extend(token_ids)
        done.cached_tokens = event.cached_tokens
        done.draft_tokens, done.accepted_draft_tokens = event.draft_tokens, event.accepted_draft_tokens
        if logprobs is not None:
            done.logprobs = [*(done.logprobs or []), *logprobs]
        if event.error is not None:
            raise InvalidRequest(event.error) if event.is_refusal else RequestFailed(event.error)
        if self.text.stop_string is not None:
            done.finish_reason, done.stop_reason = "stop", self.text.stop_string
            abort()
        elif has_ended:
            abort()
        elif event.finish_reason is not None:
            done.finish_reason, done.stop_reason = event.finish_reason, event.stop_token_id
        return done.finish_reason is not None
