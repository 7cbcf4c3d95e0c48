"""What a form asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown
from fwk_server._common.fields import RequestFields

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]
FORMATS: tuple[Format, ...] = ("json", "text", "srt", "vtt", "verbose_json")
LISTS = ("timestamp_granularities[]", "include[]")
MAX_FIELD = 4096
"""Characters of a field."""

REFUSED = {
    "include[]": "log-probabilities are not told: response_format verbose_json has the mean of each segment",
    "known_speaker_names[]": "this model tells no speakers apart",
    "known_speaker_references[]": "this model tells no speakers apart",
    "hotwords": "say in prompt which words may come",
}


class TranscriptionForm(RequestFields):
    """``multipart/form-data`` of both routes, ``file`` besides."""

    model: Annotated[str, Field(max_length=MAX_FIELD)] | None = None
    language: Annotated[str, Field(max_length=MAX_FIELD, description="As en; else the model tells it.")] | None = None
    prompt: Annotated[str, Field(max_length=MAX_FIELD, description="What may have been said before.")] | None = None
    response_format: Format = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A form that was read.

    task: ``transcribe``, or ``translate`` into English. language: a code; empty: the model tells it.
    """

    task: str
    model: str = ""
    language: str = ""
    prompt: str = ""
    format: Format = "json"
    temperature: float = 0.0
    seed: int | None = None
    is_stream: bool = False

    @property
    def has_times(self) -> bool:
        """Whether the reply tells when what was said."""
        return self.format not in ("json", "text")


def read(task: str, given: Mapping[str, str], lists: Mapping[str, Sequence[str]]) -> Asked:
    """Raises ``InvalidRequest`` that names the field."""
    fields = {name: value for name, value in given.items() if value != ""}
    many = {name: list(values) for name, values in lists.items() if any(values)}
    for name in (*fields, *many):
        if name in REFUSED:
            raise InvalidRequest(f"{name} is not supported: {REFUSED[name]}", name)
        if name not in TranscriptionForm.model_fields and name not in LISTS:
            known = ", ".join(("file", *TranscriptionForm.model_fields, LISTS[0]))
            raise InvalidRequest(f"{shown(name)} is not supported; there are {known}", name[:256])
    form = fields.get("response_format", "json")
    if form not in FORMATS:
        raise InvalidRequest(f"response_format must be {', '.join(FORMATS)}, not {shown(form)}", "response_format")
    if fields.get("chunking_strategy", "auto") != "auto":
        raise InvalidRequest("chunking_strategy must be auto: sounds are cut by the model's timestamps",
                             "chunking_strategy")  # fmt: skip
    _check_granularities(many.get(LISTS[0], []), form)
    is_stream = _flag(fields.get("stream", "false"))
    if is_stream and form not in ("json", "text"):
        raise InvalidRequest(f"stream is with response_format json or text, not {form}", "stream")
    return Asked(
        task,
        fields.get("model", ""),
        fields.get("language", "").lower(),
        fields.get("prompt", ""),
        form,
        _number(fields, "temperature", 0, 1),
        _seed(fields.get("seed")),
        is_stream,
    )


def _check_granularities(asked: Sequence[str], form: str) -> None:
    name = LISTS[0]
    for value in asked:
        if value == "word":
            raise InvalidRequest("timestamps of words are not told, only of segments", name)
        if value != "segment":
            raise InvalidRequest(f"{name} must be segment, not {shown(value)}", name)
    if asked and form != "verbose_json":
        raise InvalidRequest(f"{name} is with response_format verbose_json, not {form}", name)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"stream must be true or false, not {shown(text)}", "stream")
    return text.lower() in ("true", "1")


def _number(fields: Mapping[str, Any], name: str, low: float, high: float) -> float:
    text = fields.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low} to {high}, not {shown(text)}", name)
    return value


def _seed(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        value = int(text[:24])
    except ValueError:
        value = 2**63
    if not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"seed must be a whole number of 64 bits, not {shown(text)}", "seed")
    return value
