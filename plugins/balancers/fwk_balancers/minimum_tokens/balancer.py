"""The fewest tokens of open requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.types import Request
from fwk_balancers.minimum_tokens import MinimumTokensOptions


class MinimumTokens(LoadBalancer):
    """The replica whose open requests have the fewest tokens; of equals, the one that was not chosen for longest.

    A request has those of its prompt, and for each sequence those that it is expected to generate. So one of 100,000
    tokens weighs what many short ones do, where ``shortest_queue`` counts one.
    """

    def __init__(self, context: BalanceContext) -> None:
        super().__init__(context)
        options: MinimumTokensOptions = context.options or MinimumTokensOptions()
        self._expected = options.balance_output_tokens
        self._open = [0] * context.num_replicas
        self._chosen_at = [0] * context.num_replicas
        self._num_choices = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        chosen = min(replicas, key=lambda replica: (self._open[replica.index], self._chosen_at[replica.index]))
        self._num_choices += 1
        self._chosen_at[chosen.index] = self._num_choices
        self._open[chosen.index] += self._tokens(request)
        return chosen

    def ended(self, request: Request, replica: Replica) -> None:
        self._open[replica.index] -= self._tokens(request)

    def info(self, replica: Replica) -> dict[str, Any]:
        return {"open_tokens": self._open[replica.index]}

    def _tokens(self, request: Request) -> int:
        expected = self._expected
        if request.sampling.max_tokens is not None:
            expected = min(expected, request.sampling.max_tokens)
        return len(request.prompt_token_ids) + request.n * expected
