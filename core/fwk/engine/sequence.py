"""A sequence as the scheduler keeps it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from fwk.engine.window_blocks import WindowBlocks
from fwk.features.engine import Parts
from fwk.types import FinishReason, Request, ScheduledSequence


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One growing list of tokens, with its blocks.

    ``num_computed_tokens`` counts the tokens whose K/V exist once every launched step has run; ``num_pending`` the
    tokens those steps will add, whose ids are not known here yet. Drafts that are being verified count in both as if
    all were accepted, until their step has come back. Prompt chunks, decoding and verification are one thing: a step
    computes the next of ``num_tokens - num_computed_tokens`` tokens.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cache_prompt",
        "cached_tokens",
        "drafts",
        "ending_ids",
        "has_drafts_in_flight",
        "index",
        "is_owned",
        "key",
        "node",
        "num_accepted_drafts",
        "num_computed_tokens",
        "num_drafts",
        "num_pending",
        "num_preemptions",
        "num_shared_blocks",
        "num_window_trimmed",
        "order",
        "parts",
        "plain_step",
        "quiet_until",
        "rank",
        "replaced_blocks",
        "request",
        "runs_ahead",
        "slot",
        "state_saved",
        "state_source",
        "status",
        "token_ids",
        "was_admitted",
        "window_blocks",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, order: int, arrival: float, parts: Parts = ()) -> None:
        self.request = request
        self.parts = parts  # of features that concern it
        self.index = index
        self.key = (request.request_id, index)
        self.order = order  # by arrival; unique
        self.rank: Any = None  # the policy's word on its place, as of when it last came to wait
        self.arrival = arrival
        self.status = Status.WAITING
        self.token_ids = list(request.prompt_token_ids)
        known = [ids for part in parts if (ids := part.cache_ids(request)) is not None]
        self.cache_prompt = known[0] if known else None  # its prompt as the prefix cache knows it, if otherwise
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.num_preemptions = 0
        self.drafts: list[int] = []
        self.has_drafts_in_flight = False
        self.runs_ahead = False  # of which steps are planned while drafts are in flight
        self.slot = -1
        self.blocks: list[int] = []
        self.is_owned: list[bool] = []  # per block: ours to free (else the prefix cache's)
        self.replaced_blocks: list[tuple[int, int]] = []  # what the workers are still to be told
        self.window_blocks: list[WindowBlocks | None] = []  # for each of ``blocks``, where layers are in groups
        self.num_window_trimmed = 0  # leading ones that were given back: no token to come sees them
        self.node: Any = None  # the locked path in the prefix cache
        self.state_source = -1  # place of the kept state it starts from; -1: it starts from none
        self.state_saved: tuple[int, int] | None = None  # block at whose end its state is kept, and the place
        self.num_shared_blocks = 0  # leading blocks already offered to the prefix cache
        self.cached_tokens = 0  # of the prompt, found in the cache at first admission
        self.num_drafts = self.num_accepted_drafts = 0  # that were verified, and of them
        self.was_admitted = False
        self.quiet_until = 0  # with fewer tokens computed, one more needs no block, shares none and is not its last
        self.plain_step: ScheduledSequence | None = None  # one such token, while it has its slot
        self.ending_ids: frozenset[int] | None = None  # tokens that may end it, once somebody has asked

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def cache_token_ids(self) -> list[int]:
        """Its tokens as the prefix cache knows them: not to be changed."""
        prompt = self.cache_prompt
        return self.token_ids if prompt is None else [*prompt, *self.token_ids[len(prompt) :]]

    @property
    def num_tokens(self) -> int:
        """Tokens once every launched step has run."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V no launched step computes."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        given = self.request.sampling.max_tokens
        return 1 if given is None else given

    @property
    def num_matchable_tokens(self) -> int:
        """Tokens that may come from the cache: the last one is computed for its logits."""
        count = len(self.token_ids) - 1
        for part in self.parts:
            count = min(count, max(part.matchable(self, count), 0))
        return count

    @property
    def place(self) -> tuple[Any, int]:
        """Its place among the running: by rank, equals by arrival."""
        return self.rank, self.order

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is left to compute."""
        return self.num_uncomputed_tokens <= 1

    @property
    def owned_blocks(self) -> list[int]:
        own = [block for block, owned in zip(self.blocks, self.is_owned, strict=True) if owned]
        for windowed in self.window_blocks:
            if windowed is not None and windowed.key is None:
                own += windowed.ids
        return own

    @property
    def is_last_token_launched(self) -> bool:
        """Whether the steps already launched produce the last token it may have, or its vector."""
        return self.num_output_tokens + self.num_pending >= max(self.max_tokens, 1)

    def seed(self, server_seed: int) -> int:
        """Its own seed: from the request's, or else from the server's and the order of arrival."""
        given = self.request.sampling.seed
        if given is not None:
            return (given + self.index * 0x9E3779B97F4A7C15) % 2**64
        return (server_seed + (self.order + 1) * 0xD1B54A32D192ED03) % 2**64

    def stop_reason(self, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Why the newest token ends the sequence, if it does, and the stop token if the user named it."""
        sampling = self.request.sampling
        token = self.token_ids[-1]
        if self.num_output_tokens >= sampling.min_tokens:
            if token in sampling.stop_token_ids:
                return "stop", token
            if token in eos_token_ids and not sampling.ignore_eos:
                return "stop", None
        return ("length" if self.num_output_tokens >= self.max_tokens else None), None
