"""The body of SGLang's /update_weights_from_disk."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fwk.errors import InvalidRequest


class UpdateRequest(BaseModel):
    """SGLang's fields. What has one meaning only here is refused with another value."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model_path: str = Field(min_length=1, max_length=4096)
    load_format: str | None = Field(None, min_length=1, max_length=256)
    abort_all_requests: bool = False
    weight_version: str | None = Field(None, min_length=1, max_length=256)
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = Field(0, ge=0, le=2**53)
    flush_cache: bool = True
    model: str | None = Field(None, max_length=256)  # which one, on a server of several


_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("is_async", False, "the reply comes when the weights are in place"),
    ("keep_pause", False, "requests go on as soon as the weights are in place"),
    ("token_step", 0, "name the step by weight_version"),
    ("flush_cache", True, "cached K/V are those of the old weights"),
)
"""Memory of the old weights is always given back, and captured steps are always captured again."""


def checked(asked: UpdateRequest) -> UpdateRequest:
    """Raises ``InvalidRequest``."""
    for name, only, why in _REFUSED:
        if getattr(asked, name) != only:
            raise InvalidRequest(f"{name} is not supported: {why}", name)
    return asked
