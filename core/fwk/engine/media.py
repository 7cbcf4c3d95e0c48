"""What was made of the media of requests: workers open it before a sequence starts, and hold it until the last ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fwk.errors import InvalidRequest
from fwk.types import Request


class MediaPayloads:
    """The payloads that workers hold for requests that wait or run.

    A file may be gone as soon as its request was aborted, while steps of it are still in flight: what is open then
    stays readable. ``call`` runs an operation on all workers (``Executor.call``); None: the model takes no media.
    """

    def __init__(self, call: Callable[..., list[Any]] | None = None) -> None:
        self._call = call
        self._counts: Counter[str] = Counter()  # requests that read a file: those of a beam search share one

    def enter(self, request: Request) -> None:
        """A request arrives. Raises ``InvalidRequest`` where it cannot be served."""
        if not request.media:
            return
        if self._call is None:
            raise InvalidRequest("this engine's model takes text only", "messages")
        if request.media[-1].end > len(request.prompt_token_ids):
            raise InvalidRequest("the request's media end behind its prompt", "messages")
        paths = _paths(request)
        new = [path for path in paths if not self._counts[path]]
        troubles = [trouble for trouble in self._call("open_media", new) if trouble] if new else []
        if troubles:
            self._call("close_media", new)
            raise InvalidRequest(troubles[0], "messages")
        self._counts.update(paths)

    def leave(self, request: Request) -> None:
        """None of its sequences waits or runs any more."""
        if not request.media or self._call is None:
            return
        paths = _paths(request)
        self._counts.subtract(paths)
        left = [path for path in paths if not self._counts[path]]
        for path in left:
            del self._counts[path]
        if left:
            self._call("close_media", left)


def _paths(request: Request) -> list[str]:
    return sorted({item.payload for item in request.media})
