"""The part in the server: sends the media of a prompt along."""

from __future__ import annotations

from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk.interfaces.feature import RequestPart, ServerPart
from fwk_multimodal.media import PromptMedia


class MediaRequests(ServerPart):
    """Has a part in requests with media. Their payloads are there as long as the input refers to them."""

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        return MediaRequest() if isinstance(item, GenerateInput) and item.media else None


class MediaRequest(RequestPart):
    """One with media."""

    async def enter(self, item: GenerateInput) -> PromptMedia | None:
        self._payload = item.payload  # a file, removed when nothing refers to it any more
        return PromptMedia(list(item.media))
