"""Token healing: a prompt's last token is chosen again, so that the text may continue within it.

A prompt that ends within a word has a last token that seldom stands before the rest of the word. It is taken off, and
the output must begin with its text (which the reply leaves out): "The link is <a href=\\"http:" may continue "://".
The idea is that of the guidance library's "token healing" (S. Lundberg, "The Art of Prompt Design: Prompt Boundaries
and Token Healing", 2023).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta
from fwk.types import GrammarRequest
from fwk_server._common.beams import FEATURE
from fwk_server._common.best_of import plain
from fwk_server._common.chat.constraints import NO_GRAMMAR

MAX_TOKENS = 4
"""That a character may be spread over; text cannot be chosen again within one."""


@dataclass(frozen=True, slots=True)
class HealedInput(GenerateInput):
    """A prompt without its last tokens, whose text ``prefix`` the output begins with."""

    prefix: str = ""


def healed(item: GenerateInput, frontend: Frontend) -> GenerateInput:
    """``item`` with its last token to be chosen again; as it is where that is a special token, or the only one.

    Raises ``InvalidRequest`` where output cannot be constrained, or is already.
    """
    if "regex" not in frontend.grammar_kinds:
        raise InvalidRequest(f"token_healing: {NO_GRAMMAR}", "token_healing")
    if item.sampling.grammar is not None:
        raise InvalidRequest("token_healing cannot be had with a grammar: it is one", "token_healing")
    if type(item) is not GenerateInput or FEATURE in item.extras:
        raise InvalidRequest("token_healing cannot be had with beams or best_of", "token_healing")
    ids = item.prompt_token_ids
    for count in range(1, min(MAX_TOKENS, len(ids) - 1) + 1):
        if not frontend.text.decode(ids[-count:][:1], skip_special_tokens=True):
            break  # a special token
        try:
            prefix = b"".join(map(frontend.text.token_bytes, ids[-count:])).decode()
        except UnicodeDecodeError:
            continue
        pattern = re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", prefix).replace("\n", r"\n") + r"(.|\n)*"
        sampling = msgspec.structs.replace(item.sampling, grammar=GrammarRequest("regex", pattern))
        fields = plain(replace(item, prompt_token_ids=ids[:-count], sampling=sampling))
        return HealedInput(**fields, prefix=prefix)
    return item


async def without_prefix(frontend: Frontend, item: HealedInput) -> AsyncGenerator[list[OutputDelta], None]:
    """The outputs, less the text the prompt had already; tokens and their scores are all that were chosen."""
    left = [len(item.prefix)] * item.n
    async with aclosing(frontend.generate(item)) as steps:
        async for deltas in steps:
            for delta in deltas:
                cut = min(left[delta.index], len(delta.text))
                left[delta.index] -= cut
                delta.text = delta.text[cut:]
            yield deltas
