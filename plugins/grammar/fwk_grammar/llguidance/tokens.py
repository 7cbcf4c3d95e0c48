"""The model's vocabulary as llguidance wants it."""

from __future__ import annotations

from fwk.interfaces.grammar import GrammarContext
from llguidance import LLTokenizer


class Tokens:
    """Has the members llguidance asks of a tokeniser: bytes of all tokens, and a way to encode text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, context: GrammarContext) -> None:
        self._tokenizer = context.tokenizer
        self.tokens = [bytes(piece) for piece in context.token_bytes]
        # llguidance needs a token to end with. A model without one gets an id behind its last, which is never sampled.
        self.eos_token_ids = list(context.eos_token_ids) or [len(self.tokens)]
        self.tokens += [b""] * (max(self.eos_token_ids) + 1 - len(self.tokens))
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = sorted(context.special_ids | set(self.eos_token_ids))
        special = set(self.special_token_ids)
        self._by_bytes = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str) -> list[int]:
        """Encode text that stands in the middle of an output.

        llguidance forces these tokens where a grammar leaves no choice, so they must say exactly ``text``. Tokenisers
        that put a blank before it, or normalise it, are not asked: the longest tokens that fit are taken.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        wanted = text.encode()
        if b"".join(self.tokens[i] for i in ids) == wanted and not set(ids) & set(self.special_token_ids):
            return ids
        return self._greedy(wanted)

    def _greedy(self, data: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(start + self._longest, len(data)), start, -1):
                found = self._by_bytes.get(data[start:end])
                if found is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                return ids  # no token begins like this: what is left stays unforced
        return ids

    def build(self) -> LLTokenizer:
        """The vocabulary's trie; a tenth of a second per 50,000 tokens."""
        return LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.eos_token_ids)  # type: ignore[arg-type]
