"""The longest prefix, within bounds of load."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.types import Request
from fwk_balancers.cache_aware import CacheAwareOptions
from fwk_balancers.cache_aware.prefixes import CHUNK, Prefixes, chunks_of

log = logging.getLogger(__name__)


class CacheAware(LoadBalancer):
    """Remembers which prompts went where, as a stand-in for what the prefix caches hold.

    A prompt goes to the replica that has most of it, if that is ``cache_threshold`` of it or more and the replica is
    not behind: more open sequences than the least loaded has, by both bounds. Else it goes to the one with the fewest
    open sequences; of equals, to the one that has been sent the least, then to the one not chosen for longest.
    """

    def __init__(self, context: BalanceContext) -> None:
        super().__init__(context)
        self._options: CacheAwareOptions = context.options or CacheAwareOptions()
        self._prefixes = [Prefixes(self._options.max_tree_size) for _ in range(context.num_replicas)]
        self._chosen_at = [0] * context.num_replicas
        self._num_choices = 0
        self._why = [Counter[str]() for _ in range(context.num_replicas)]

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        chunks = chunks_of(request.cache_namespace, request.prompt_token_ids)
        for replica in replicas:
            if _is_empty(replica):
                self._prefixes[replica.index].clear()
        least = min(replicas, key=self._load)
        held = {replica.index: self._prefixes[replica.index].match(chunks) for replica in replicas}
        holder = min(replicas, key=lambda replica: (-held[replica.index], *self._load(replica)))
        if not chunks or held[holder.index] < self._options.cache_threshold * len(chunks):
            chosen, why = least, "new"
        elif self._is_behind(holder, least):
            chosen, why = least, "behind"
        else:
            chosen, why = holder, "prefix"
        self._note(request, chosen, why, held[chosen.index] * CHUNK)
        self._prefixes[chosen.index].add(chunks)
        return chosen

    def info(self, replica: Replica) -> dict[str, Any]:
        """Requests by reason, and tokens.

        prefix: it had the prefix. new: none had it, and it had the fewest open sequences. behind: so it had, and the
        one with the prefix had too many. cached_tokens: of their prompts, those that it may have had. known_tokens: of
        prompts, those that it may have now.
        """
        counts = {name: self._why[replica.index][name] for name in ("prefix", "behind", "new", "cached_tokens")}
        return {"choices": counts | {"known_tokens": len(self._prefixes[replica.index]) * CHUNK}}

    def _load(self, replica: Replica) -> tuple[int, int, int]:
        return replica.num_open, len(self._prefixes[replica.index]), self._chosen_at[replica.index]

    def _is_behind(self, replica: Replica, least: Replica) -> bool:
        is_more = replica.num_open - least.num_open > self._options.balance_abs_threshold
        return is_more and replica.num_open > least.num_open * self._options.balance_rel_threshold

    def _note(self, request: Request, chosen: Replica, why: str, num_cached: int) -> None:
        self._num_choices += 1
        self._chosen_at[chosen.index] = self._num_choices
        self._why[chosen.index].update({why: 1, "cached_tokens": num_cached})
        log.debug(
            "request %s of %d tokens goes to replica %d (%s): %d of them may be cached there, %d sequences are open",
            request.request_id,
            len(request.prompt_token_ids),
            chosen.index,
            why,
            num_cached,
            chosen.num_open,
        )


def _is_empty(replica: Replica) -> bool:
    """Whether its KV cache holds nothing: it was started again, or its prefix cache was emptied."""
    stats = replica.stats
    return not replica.num_open and 0 < stats.num_blocks == stats.num_free_blocks
