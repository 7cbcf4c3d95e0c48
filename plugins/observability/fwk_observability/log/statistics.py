"""The line of statistics: what the engine's counters say between two looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fwk.types import EngineStats


@dataclass(frozen=True, slots=True)
class Statistics:
    """Rates over the time between two readings of the engine's state, and its state at the later one.

    prompt_tokens_per_s: tokens of prompts begun, those from the prefix cache included.
    kv_usage: share of the KV cache's blocks that sequences hold, 0 to 1.
    cache_hits, acceptance: shares of prompt tokens from the prefix cache and of drafted tokens that were accepted; None
        where nothing was looked up or drafted.
    """

    running: int
    waiting: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    kv_usage: float
    cache_hits: float | None
    acceptance: float | None
    preemptions: int

    @classmethod
    def between(cls, before: EngineStats, now: EngineStats, seconds: float) -> Statistics:
        """What happened in ``seconds``; counters that have fallen are those of an engine that was restarted."""

        def grown(name: str) -> int:
            first, last = getattr(before, name), getattr(now, name)
            return last - first if last >= first else last

        prompt, drafts = grown("prompt_tokens"), grown("draft_tokens")
        return cls(
            now.num_running,
            now.num_waiting,
            prompt / seconds,
            grown("generation_tokens") / seconds,
            now.num_held_blocks / now.num_blocks if now.num_blocks else 0.0,
            grown("cached_prompt_tokens") / prompt if prompt else None,
            grown("accepted_draft_tokens") / drafts if drafts else None,
            grown("preemptions"),
        )

    def fields(self) -> dict[str, Any]:
        """For a log of JSON objects."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        parts = [
            f"running {self.running}",
            f"waiting {self.waiting}",
            f"in {self.prompt_tokens_per_s:.1f} tok/s",
            f"out {self.generation_tokens_per_s:.1f} tok/s",
            f"KV cache {self.kv_usage:.1%}",
        ]
        if self.cache_hits is not None:
            parts.append(f"prefix cache hits {self.cache_hits:.1%}")
        if self.acceptance is not None:
            parts.append(f"drafts accepted {self.acceptance:.1%}")
        if self.preemptions:
            parts.append(f"pre-emptions {self.preemptions}")
        return ", ".join(parts)
