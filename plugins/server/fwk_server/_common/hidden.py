"""Hidden states in replies, in SGLang's shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from fwk.errors import InvalidRequest


def check_hidden(is_wanted: bool | None, **others: object) -> None:
    """Refuse what hidden states cannot be had with. others: fields of the request, by name."""
    for name, value in others.items():
        if is_wanted and value:
            raise InvalidRequest(f"return_hidden_states cannot be had with {name}", "return_hidden_states")


def all_states(rows: Sequence[bytes], num_prompt_tokens: int) -> list[orjson.Fragment]:
    """Of a sequence as SGLang's ``/generate`` has them: a list of the prompt's, then those of each further token."""
    prompt = _json(b"".join(rows[:num_prompt_tokens]), num_prompt_tokens)
    return [prompt, *(_json(row) for row in rows[num_prompt_tokens:])]


def last_state(rows: Sequence[bytes], num_prompt_tokens: int) -> orjson.Fragment | list[float]:
    """Of the last token, as SGLang's OpenAI routes have it: empty where the output is a single token."""
    return _json(rows[-1]) if len(rows) > num_prompt_tokens else []


def _json(data: bytes, num_rows: int | None = None) -> orjson.Fragment:
    array = np.frombuffer(data, "<f4")
    if num_rows is not None:
        array = array.reshape(num_rows, -1)
    return orjson.Fragment(orjson.dumps(array.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY))
