"""Ranks without processes."""

from __future__ import annotations

from torch import Tensor

from fwk.interfaces.parallel import ParallelGroup, Stage


class Rank(ParallelGroup):
    """One rank whose collectives leave its own part to the test."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x


class FakeStage(Stage):
    """One of several stages in one process. hidden, tokens: what is under way, in the order in which it was sent."""

    def __init__(
        self, index: int, count: int, hidden: list[Tensor] | None = None, tokens: list[Tensor] | None = None
    ) -> None:
        self.index, self.count = index, count
        self._hidden = [] if hidden is None else hidden
        self._tokens = [] if tokens is None else tokens

    def send_hidden(self, x: Tensor) -> None:
        self._hidden.append(x)

    def receive_hidden(self, x: Tensor) -> Tensor:
        return x.copy_(self._hidden.pop(0))

    def send_tokens(self, token_ids: Tensor) -> None:
        self._tokens.append(token_ids)

    def receive_tokens(self, count: int) -> Tensor:
        token_ids = self._tokens.pop(0)
        assert len(token_ids) == count
        return token_ids


class StageRank(Rank):
    """The only rank of a stage."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(0, 1)
        self.stage = stage
