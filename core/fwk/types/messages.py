"""The typed messages between an API process and an engine process (msgspec over zmq, never pickle)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from fwk.types.request import Features, FinishReason, Request, TokenLogprobs

PROTOCOL = 10
"""Raised with every incompatible change; an engine refuses a client that speaks another one."""


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """Queue a request. Answered by ``TokenEvent``s until every sequence has finished."""

    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request, or only its sequence ``index``. Unknown ids are ignored: the race with finishing is normal."""

    request_id: str
    index: int | None = None


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Keep a request from running while its client does not read what it has (``is_on``), or let it continue."""

    request_id: str
    is_on: bool = True


class CallWorkers(msgspec.Struct, tag=True, frozen=True):
    """Run an operation on every worker, between two steps. Answered by ``WorkersAnswer`` with the same number."""

    number: int
    name: str
    arguments: list[Any] = []


class CallFeature(msgspec.Struct, tag=True, frozen=True):
    """Run an operation of a feature's part in the engine, between two steps. Answered by ``WorkersAnswer``."""

    number: int
    feature: str
    operation: str
    arguments: list[Any] = []


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered by the engine loop itself with a ``Pong`` of the same number: a hung loop does not answer."""

    number: int
    protocol: int = PROTOCOL


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop the engine process. Requests still running end with an abort."""


class TokenEvent(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of one sequence. The last event of a sequence has a ``finish_reason``.

    - ``request_id``: of ``Request``.
    - ``index``: of the sequence in it.
    - ``token_ids``: new tokens.
    - ``stop_token_id``: the token that ended it; None: none did.
    - ``cached_tokens``: of the prompt, whose K/V came from the prefix cache.
    - ``logprobs``: an entry per token; None: not asked for.
    - ``is_complete``: it ended because nothing may follow: its last token is no stop token, but part of the output.
    - ``is_refusal``: ``error`` is due to what the request asks for.
    - ``draft_tokens``: drafts of this sequence that were verified so far.
    - ``accepted_draft_tokens``: of ``draft_tokens``, those that stand.
    - ``features``: what engine parts send the server (``Wire.event``).
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    is_complete: bool = False
    is_refusal: bool = False
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    features: Features = {}


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state after a step. Counters grow for the engine's life; the others are of now.

    - ``num_running``: sequences that have a slot.
    - ``num_waiting``: sequences that have none.
    - ``num_blocks``: of the KV cache.
    - ``num_free_blocks``: that hold nothing.
    - ``num_held_blocks``: of running sequences.
    - ``num_cached_blocks``: that the prefix cache could give up.
    - ``prompt_tokens``: of started sequences.
    - ``cached_prompt_tokens``: of them, those whose K/V were in the prefix cache or a tier.
    - ``generation_tokens``: that were chosen.
    - ``preemptions``: of running sequences.
    - ``steps``: that were planned.
    - ``finished``: sequences that ended by themselves.
    - ``aborted``: sequences that were aborted.
    - ``draft_tokens``: that were verified.
    - ``accepted_draft_tokens``: of them, those that stand.
    - ``restored_prompt_tokens``: of ``cached_prompt_tokens``, those that came from a cache tier.
    - ``dropped_messages``: to clients that do not read.
    - ``verifications``: steps of sequences that had drafts.
    - ``accepted_by_position``: in how many of these at least one draft was accepted, at least two, ...
    - ``draft_seconds``: what the speculative decoder took.
    - ``verify_seconds``: what the rest of the steps with drafts took.
    - ``features``: numbers of features' parts in the engine; gauges among them are those whose names begin with
      ``num_``.
    - ``troubles``: what runs otherwise than was asked since something failed, a sentence each: /health is degraded.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_held_blocks: int = 0
    num_cached_blocks: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    restored_prompt_tokens: int = 0
    dropped_messages: int = 0
    verifications: int = 0
    accepted_by_position: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    features: dict[str, dict[str, float]] = {}
    troubles: tuple[str, ...] = ()

    def without_gauges(self) -> EngineStats:
        """What is left of an engine that has ended: what it had done, which counters must not lose."""
        features = {
            name: {field: 0 if field.startswith("num_") else number for field, number in numbers.items()}
            for name, numbers in self.features.items()
        }
        gauges = {name: 0 for name in self.__struct_fields__ if name.startswith("num_")}
        return msgspec.structs.replace(self, **gauges, features=features, troubles=())


def total_stats(every: Sequence[EngineStats]) -> EngineStats:
    """Engines' numbers together: every field counts something, so they add up."""
    if len(every) == 1:
        return every[0]
    by_position = tuple(map(sum, zip_longest(*(stats.accepted_by_position for stats in every), fillvalue=0)))
    others = ("accepted_by_position", "features", "troubles")
    names = [name for name in EngineStats.__struct_fields__ if name not in others]
    features: dict[str, dict[str, float]] = {}
    for name, numbers in [item for stats in every for item in stats.features.items()]:
        own = features.setdefault(name, {})
        own |= {field: own.get(field, 0) + number for field, number in numbers.items()}
    return EngineStats(
        **{name: sum(getattr(stats, name) for stats in every) for name in names},
        accepted_by_position=by_position,
        features=features,
        troubles=tuple(dict.fromkeys(one for stats in every for one in stats.troubles)),
    )


class StepOutputs(msgspec.Struct, tag=True, frozen=True):
    """Everything one step produced, in one message."""

    events: list[TokenEvent]
    stats: EngineStats


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``Ping``."""

    number: int
    stats: EngineStats


class WorkersAnswer(msgspec.Struct, tag=True, frozen=True):
    """What became of ``CallWorkers`` (results by rank) or ``CallFeature``, or why it was refused.

    - ``param``: the field of the client's request that was wrong
    - ``is_fault``: a plugin has failed, and no request was wrong
    """

    number: int
    results: list[Any] = []
    error: str | None = None
    param: str | None = None
    is_fault: bool = False


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """Sent once, when the model is loaded and requests are taken.

    - ``fingerprint``: of the installed plugins, which server and engine must have in common.
    - ``num_blocks``: of the KV cache.
    - ``block_size``: tokens in a block.
    - ``max_model_len``: tokens of prompt and output together.
    - ``vocab_size``: width of the logits.
    - ``chosen``: what was selected for each family that had a choice: family -> plugin name.
    - ``reasons``: sentences about refusals and fallbacks on the way to ``chosen``.
    - ``refused``: why each of the other plugins could not be had alongside ``chosen``: family -> plugin name ->
      sentence.
    - ``num_block_tables``: block tables of a sequence: it grows by as many blocks at a time, where nothing is behind a
      window yet.
    - ``weights_identity``: ``Checkpoint.weights_identity`` of the weights of the start.
    """

    fingerprint: str
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    chosen: dict[str, str]
    reasons: list[str]
    refused: dict[str, dict[str, str]] = {}
    num_block_tables: int = 1
    weights_identity: str = ""


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine's last words: no request will be answered any more. ``detail`` is for the log alone.

    ``exit_code``: of the error that kept it from starting (``FwkError.exit_code``), for the server to end with.
    """

    message: str
    detail: str = ""
    exit_code: int | None = None


ToEngine = AddRequest | Abort | Pause | CallWorkers | CallFeature | Ping | Shutdown
FromEngine = StepOutputs | Pong | WorkersAnswer | EngineReady | EngineFailed
