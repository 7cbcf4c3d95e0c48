"""The ``prompt`` of a completions request: a string, ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, TextTools
from fwk.types.sampling import check_token_ids
from fwk_server._common.chat.models import MAX_PROMPTS

_KINDS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


@dataclass(slots=True)
class Prompt:
    """One prompt; ``text`` is None when the client sent ids."""

    token_ids: list[int]
    text: str | None = None

    def as_text(self, text: TextTools, skip_special_tokens: bool) -> str:
        """The prompt as its echo shows it: the client's own text, or what its ids stand for."""
        return text.decode(self.token_ids, skip_special_tokens) if self.text is None else self.text


def read_prompts(
    value: Any, add_special_tokens: bool, frontend: Frontend, name: str = "prompt", most: int = MAX_PROMPTS
) -> list[Prompt]:
    """Check and tokenise; the error names the element that is of another kind than the first.

    ``name`` is the field's, ``most`` the number of prompts it may hold.
    """
    if isinstance(value, str):
        return [_tokenised(value, add_special_tokens, frontend, name)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be {_KINDS}", name)
    if not value:
        raise InvalidRequest(f"{name} must not be empty", name)
    if type(value[0]) is int:
        return [_given(_ids(value, name, name), name, frontend)]
    if len(value) > most:
        raise InvalidRequest(f"at most {most} {name}s, not {len(value)}", name)
    if isinstance(value[0], str):
        texts = [_text(part, name, i) for i, part in enumerate(value)]
        names = [f"{name}[{i}]" if len(texts) > 1 else name for i in range(len(texts))]
        return [_tokenised(part, add_special_tokens, frontend, at) for part, at in zip(texts, names, strict=True)]
    ats = [f"{name}[{i}]" if len(value) > 1 else name for i in range(len(value))]
    parts = [_ids(part, name, f"{name}[{i}]") for i, part in enumerate(value)]
    return [_given(part, at, frontend) for part, at in zip(parts, ats, strict=True)]


def _tokenised(text: str, add_special_tokens: bool, frontend: Frontend, at: str) -> Prompt:
    frontend.text.check_fits(text, frontend.card.max_prompt_len, at)
    return Prompt(frontend.text.encode(text, add_special_tokens), text)


def _given(ids: list[int], at: str, frontend: Frontend) -> Prompt:
    check_token_ids(ids, frontend.card.vocab_size, at, len(ids))  # before an echo turns them into text
    return Prompt(ids)


def _text(part: Any, name: str, i: int) -> str:
    if not isinstance(part, str):
        raise InvalidRequest(f"{name}[{i}] must be a string, as {name}[0] is", f"{name}[{i}]")
    return part


def _ids(value: Any, name: str, at: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{at}: {name} must be {_KINDS}", at)
    if not value:
        raise InvalidRequest(f"{at} must not be empty", at)
    if set(map(type, value)) != {int}:
        raise _not_an_id(value, at)
    return value


def _not_an_id(value: Sequence[Any], at: str) -> InvalidRequest:
    i = next(i for i, part in enumerate(value) if type(part) is not int)
    return InvalidRequest(f"{at}[{i}] must be a token id, as {at}[0] is", f"{at}[{i}]")
