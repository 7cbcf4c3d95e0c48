"""The part in the engine: workers open what was made of media before a sequence starts, until the last has ended.

A prefix cache knows a placeholder by its media's hash, and a step on a CPU comes to one piece of media at most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import cycle, islice

from fwk.errors import InvalidRequest
from fwk.interfaces.feature import EnginePart, EnginePartContext, FeatureSequence
from fwk.interfaces.multimodal import Media
from fwk.types import Request
from fwk_multimodal.media import MediaOptions, PromptMedia, encodes_apart

NUM_KEY_BYTES = 32
MAX_SEEN = 1024
"""Pieces that are taken for encoded before, the newest. A step that encodes one of them anew only takes longer."""


def cache_ids(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """A prompt as prefix caches know it: a placeholder's id is a word of its media's hash.

    The words of a hash come one after another, so that eight tokens or more hold all of it. They are negative, so that
    none is a token's id, and of 32 bits, as ids are.
    """
    ids = list(token_ids)
    for item in media:
        words = [~(int.from_bytes(item.key[i : i + 4], "little") >> 1) for i in range(0, NUM_KEY_BYTES, 4)]
        ids[item.start : item.end] = islice(cycle(words), item.length)
    return ids


class MediaPrompts(EnginePart):
    """The payloads that workers hold for requests that wait or run.

    A file may be gone as soon as its request was aborted, while steps of it are still in flight: what is open then
    stays readable.
    """

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._counts: Counter[str] = Counter()  # requests that read a file: those of a beam search share one
        self._media: dict[str, list[Media]] = {}  # by request
        options: MediaOptions | None = context.options
        step_tokens = 0 if options is None else options.mm_encoder_step_tokens
        self._budget = 0 if encodes_apart(options) else step_tokens or int(context.is_host)
        """Tokens of pieces that were not seen before, in a step, beyond one piece; 0: any number."""
        self._begun: dict[bytes, int] = {}  # tokens of new pieces, by key, that this step may come to
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # keys of those that workers may have kept
        self._max_seen = MAX_SEEN if options is None or options.mm_encoder_cache_bytes else 0

    def check(self, request: Request) -> None:
        asked: PromptMedia = self.asked(request)
        if asked.media[-1].end > len(request.prompt_token_ids):
            raise InvalidRequest("the request's media end behind its prompt", "messages")
        paths = _paths(asked.media)
        new = [path for path in paths if not self._counts[path]]
        troubles = [trouble for trouble in self.context.call("open", new) if trouble] if new else []
        if troubles:
            self.context.call("close", new)
            raise InvalidRequest(troubles[0], "messages")
        self._counts.update(paths)
        self._media[request.request_id] = asked.media

    def left(self, request: Request) -> None:
        paths = _paths(self._media.pop(request.request_id))
        self._counts.subtract(paths)
        left = [path for path in paths if not self._counts[path]]
        for path in left:
            del self._counts[path]
        if left:
            self.context.call("close", left)

    def cache_ids(self, request: Request) -> list[int]:
        return cache_ids(request.prompt_token_ids, self._media[request.request_id])

    def planning(self) -> None:
        if self._begun:
            for key in self._begun:
                self._seen[key] = None
                self._seen.move_to_end(key)
            self._begun.clear()
            while len(self._seen) > self._max_seen:
                self._seen.popitem(last=False)

    def takes_longer(self) -> bool:
        return bool(self._begun)

    def limit(self, sequence: FeatureSequence, start: int, count: int) -> int:
        """A step encodes no more new pieces than its budget has tokens, but one, whose sequence is asked first.

        Asked again, it says the same. What comes encoded costs no more than text. No step ends within a piece whose
        tokens see each other.
        """
        end = start + count
        touched = [m for m in self._media[sequence.request.request_id] if m.end > start and m.start < end]
        for item in touched if self._budget else ():
            if item.key in self._seen or item.key in self._begun:
                continue
            if self._begun and sum(self._begun.values()) + item.length > self._budget:
                end = max(item.start, start)
                break
            self._begun[item.key] = item.length
        touched = [item for item in touched if item.start < end]
        if touched and touched[-1].is_span and touched[-1].end > end:
            end = touched[-1].start
        return max(end - start, 0)

    def restorable(self, sequence: FeatureSequence) -> bool:
        return not any(item.is_span for item in self._media[sequence.request.request_id])


def _paths(media: Sequence[Media]) -> list[str]:
    return sorted({item.payload for item in media})
