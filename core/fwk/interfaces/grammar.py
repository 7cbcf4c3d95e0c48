"""Constrained output: a grammar says which tokens may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.errors import InvalidRequest
from fwk.interfaces.declaration import Declaration
from fwk.types import GrammarKind, GrammarRequest

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

__all__ = [
    "Grammar",
    "GrammarBackend",
    "GrammarBackendSpec",
    "GrammarChecker",
    "GrammarContext",
    "GrammarKind",
    "GrammarRequest",
]


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """What a grammar backend is built with.

    ``token_bytes[i]`` is what token i adds to the text; empty for an id without a token (a padded vocabulary). Tokens
    in ``special_ids`` add nothing and are part of no text; those in ``eos_token_ids`` end it.

    - ``tokenizer``: the served model's.
    - ``token_bytes``: [vocab_size]
    - ``eos_token_ids``: may be empty
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    tokenizer: Tokenizer
    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    options: Any = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return len(self.token_bytes)

    def tokens_of(self, text: str) -> list[int]:
        """Tokens that say ``text`` in the middle of an output; none where the tokenizer would change it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        says = b"".join(self.token_bytes[i] for i in ids if i not in self.special_ids)
        return ids if says == text.encode() else []


class Grammar(ABC):
    """The state of one sequence in its grammar. Used by one thread at a time."""

    @abstractmethod
    def fill_mask(self, row: np.ndarray) -> None:
        """Set the bits of the allowed tokens: ``row`` is [ceil(vocab_size / 32)] int32, little-endian bits.

        Every bit is written. The bits of ``eos_token_ids`` are set exactly when the output may end here. A row without
        any bit means that the output is complete. Raises when the state has become too complex to continue.
        """

    @classmethod
    def fill_masks(
        cls, grammars: Sequence[Grammar], rows: np.ndarray, places: Sequence[int]
    ) -> Mapping[int, Exception]:
        """``fill_mask`` of many of this class at once, all different: of ``grammars[i]`` into ``rows[places[i]]``.

        rows: [n, ceil(vocab_size / 32)] int32. Returns what ``fill_mask`` would have raised, by the index i; the rows
        of the others are filled. A backend overrides it where one call costs less than many.
        """
        raised: dict[int, Exception] = {}
        for i, (grammar, place) in enumerate(zip(grammars, places, strict=True)):
            try:
                grammar.fill_mask(rows[place])
            except Exception as error:
                raised[i] = error
        return raised

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token; False when it is not allowed (the state then stays). Raises as ``fill_mask`` does.

        An end-of-sequence token is allowed where the output may end; after it, nothing is.
        """

    @classmethod
    def accept_each(cls, grammars: Sequence[Grammar], token_ids: Sequence[int]) -> list[bool | Exception]:
        """``accept`` of a token by each of many of this class, all different: what it returned or raised, [n].

        A backend overrides it where that costs less than many calls.
        """
        told: list[bool | Exception] = []
        for grammar, token_id in zip(grammars, token_ids, strict=True):
            try:
                told.append(grammar.accept(token_id))
            except Exception as error:
                told.append(error)
        return told

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens (rejected drafts)."""

    @abstractmethod
    def fork(self) -> Grammar:
        """An independent copy of this state."""

    def forced_tokens(self) -> list[int]:
        """How a text that must come next would be written, where the grammar leaves no choice; empty where it does.

        Drafts: the model may write the same text with other tokens. The state stays.
        """
        return []

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether only the end of the output may follow. Cheap: False is a right answer while that is not known."""


class GrammarBackend(ABC):
    """Compiles grammars, off the engine's loop. Called from any thread, also from several at once."""

    def __init__(self, context: GrammarContext) -> None:
        self.context = context

    @abstractmethod
    def compile(self, request: GrammarRequest) -> Grammar:
        """The state before the first token. Bounded in time and memory.

        Raises ``InvalidRequest``, with one sentence, for a grammar that is wrong, too large, or allows no output.
        """


class GrammarChecker:
    """Refuses grammars before a request with one is queued: a service of the server part that knows a backend.

    This one, of a server without, refuses all.
    """

    def use_backend(self, name: str) -> frozenset[str]:
        """The backend that the engines have settled on. Returns the kinds of grammars that can be asked for.

        Raises ``PluginLoadError`` if it is broken.
        """
        return frozenset()

    def check_grammar(self, request: GrammarRequest) -> None:
        """Raise ``InvalidRequest`` for a grammar that cannot be compiled. May take as long as compiling it."""
        raise InvalidRequest(
            "this server has no grammar backend, so it cannot constrain output: "
            "install one, and the feature that masks by it, or start it without --grammar-backend none",
            "grammar",
        )

    def is_known(self, request: GrammarRequest) -> bool:
        """Whether ``check_grammar`` has found it right already."""
        return False

    def takes_grammar(self, request: GrammarRequest) -> bool:
        """Whether ``check_grammar`` lets a grammar of the server's own making through; asked often."""
        return False


@dataclass(frozen=True, kw_only=True)
class GrammarBackendSpec(Declaration):
    """Declares a grammar backend (``--grammar-backend``).

    kinds: the kinds of ``GrammarRequest`` it compiles; a request of another kind is refused with its name.
    """

    family: ClassVar[str] = "grammar"

    kinds: frozenset[str] = frozenset()
