"""The parts of messages that are no text: read from their URLs, and placed in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, PlacedInput
from fwk.interfaces.multimodal import MediaItem
from fwk_server._common.body import shown, want

KINDS = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
"""Of each type of part, what it brings."""

_MEDIA = ("image", "audio", "video", "file")
_TYPES = {"image": "image_url", "audio": "input_audio", "video": "video_url"}


class NamedPart(dict[str, Any]):
    """A part that a dialect made of something else. where: what that is called in the client's own request."""

    def __init__(self, part: Mapping[str, Any], where: str) -> None:
        super().__init__(part)
        self.where = where


def place_of(part: Mapping[str, Any], otherwise: str) -> str:
    """What errors call a part."""
    return part.where if isinstance(part, NamedPart) else otherwise


class MediaParts:
    """Collects the media of a request, in the order of its messages."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self.items: list[MediaItem] = []

    def read(self, part: Mapping[str, Any], type_: str, role: str, at: str) -> dict[str, Any] | None:
        """The part as chat templates read it; None for one that is not of media. Raises ``InvalidRequest``."""
        if not any(word in type_ for word in _MEDIA):
            return None
        kind, limits, at = KINDS.get(type_, ""), self._frontend.card.media, place_of(part, at)
        if kind not in limits:
            named = " and ".join(f"{kind}s ({_TYPES[kind]})" if kind in _TYPES else kind for kind in limits)
            takes = f"text and {named}" if limits else "text only"
            raise InvalidRequest(f"{at}: this server's model reads {takes}, not {shown(type_)}", at)
        if role != "user":
            raise InvalidRequest(f"{at}: media belong to messages of the user, not of role {shown(role)}", at)
        if sum(item.kind == kind for item in self.items) >= limits[kind]:
            raise InvalidRequest(
                f"{at}: this server takes at most {limits[kind]} {kind}s in a prompt (--limit-mm-per-prompt)", at
            )
        where = place_of(part, f"{at}.{type_}")
        given = part.get(type_)
        if type_ == "input_audio":
            sound = want(given, dict, "an object", where)
            url = f"data:;base64,{want(sound.get('data'), str, 'base64', f'{where}.data')}"
        else:
            url = want(given.get("url") if isinstance(given, dict) else given, str, "a URL", f"{where}.url")
        self.items.append(self._frontend.read_media(kind, url, where))
        return {"type": kind}

    def place(self, token_ids: list[int]) -> PlacedInput:
        """The prompt with its media, if it has any."""
        if not self.items:
            return PlacedInput(token_ids, (), None)
        return self._frontend.place_media(token_ids, self.items)
