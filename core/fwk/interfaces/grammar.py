"""Constrained output: a grammar says which tokens may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """What a grammar backend is built with."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    options: Any = None


class Grammar(ABC):
    """The state of one sequence in its grammar."""

    @abstractmethod
    def fill_mask(self, row: np.ndarray) -> None:
        """Set the bits of the allowed tokens: ``row`` is [ceil(vocab_size / 32)] int32, little-endian bits."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token; False when it is not allowed (the state then stays)."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens (rejected drafts)."""

    @abstractmethod
    def forced(self) -> list[int]:
        """Tokens that are the only way on (jump-forward); empty when there is a choice."""

    @abstractmethod
    def fork(self) -> Grammar:
        """An independent copy of this state."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether only the end of the output may follow."""


class GrammarBackend(ABC):
    """Compiles grammars, off the engine's loop."""

    def __init__(self, context: GrammarContext) -> None:
        self.context = context

    @abstractmethod
    def compile(self, kind: GrammarKind, source: str) -> Grammar:
        """Raises ``InvalidRequest`` for a grammar that is wrong or too large. Bounded in time and memory."""


@dataclass(frozen=True, kw_only=True)
class GrammarBackendSpec(Declaration):
    """Declares a grammar backend (``--grammar-backend``)."""

    family: ClassVar[str] = "grammar"

    kinds: frozenset[str] = frozenset()
