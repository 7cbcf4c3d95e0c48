"""The part of a feature in an engine, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from fwk.interfaces.feature_common import Plugins, Wire
from fwk.interfaces.prefix_cache import PrefixMatch
from fwk.interfaces.schedule import SchedulePolicy, SequenceView
from fwk.types import Request


class FeatureSequence(SequenceView, Protocol):
    """What an engine part sees of a sequence. Read-only."""

    @property
    def key(self) -> tuple[str, int]:
        """The request's id and the sequence's number in it."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far; not to be changed."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """The first of ``token_ids``."""
        ...

    @property
    def num_matchable_tokens(self) -> int:
        """Its leading tokens whose K/V may come from the prefix cache."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it has a slot; else it waits."""
        ...


@dataclass(eq=False, slots=True)
class ReservedBlocks:
    """Blocks for ``token_ids``, which follow the locked path ``node`` of the prefix cache.

    - ``block_ids``: in the order of the tokens.
    """

    node: Any
    block_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True, eq=False, slots=True)
class HeldBlocks:
    """Blocks at the beginning of a locked path ``node`` of the prefix cache.

    - ``block_ids``: in the order of the tokens.
    """

    node: Any
    block_ids: list[int]


class Blocks(Protocol):
    """The engine's KV cache, for parts that fill blocks before a sequence starts, or keep some after it has ended."""

    def match(self, sequence: FeatureSequence) -> PrefixMatch:
        """What the prefix cache has of a sequence's matchable tokens now."""
        ...

    def reserve(
        self, match: PrefixMatch, token_ids: Sequence[int], count: int, num_spare: int = 0
    ) -> ReservedBlocks | None:
        """Take ``count`` blocks for the tokens after what matched; None where ``num_spare`` more would not be left.

        token_ids: the sequence's. What matched stays where it is until ``settle``.
        """
        ...

    def settle(self, reserved: ReservedBlocks, *, has_arrived: bool) -> None:
        """Give reserved blocks to the prefix cache, if their K/V have arrived, else back. Nothing may write to them."""
        ...

    def hold(self, sequence: FeatureSequence, num_tokens: int) -> HeldBlocks | None:
        """Keep the full blocks of a running sequence's first tokens until ``let_go``, also after it has ended.

        Those that the prefix cache has, and with them all that it has of the sequence; None where it has none of them.
        """
        ...

    def let_go(self, held: HeldBlocks) -> None:
        """Keep them no longer than anything else in the cache."""
        ...

    def drop(self) -> None:
        """Have the prefix cache forget everything. No sequence may be running."""
        ...


class Gate:
    """Asked before a waiting sequence starts. This one admits every sequence."""

    def poll(self) -> None:
        """The waiting are about to be looked at: find out what has become ready."""

    def lets_through(self, sequence: Any) -> bool:
        """Whether the sequence could start now. If not, see to it that it can soon."""
        return True

    @property
    def is_full(self) -> bool:
        """Whether nothing can be prepared for more sequences now."""
        return False

    def arrived(self, sequence: Any) -> None:
        """The sequence begins to wait: it is new, or was pre-empted."""

    def started(self, sequence: Any) -> None:
        """The sequence is in the plan of a step."""

    def ended(self, sequence: Any) -> None:
        """The sequence ended while it waited."""

    def wait(self) -> None:
        """There is nothing to run: wait a moment, if it is for this gate."""


@dataclass(frozen=True, slots=True)
class EnginePartContext:
    """What an engine part is built with, when the workers are loaded.

    call: ``call(operation, *args)`` runs an operation of the feature's worker parts on every worker, between two steps;
        the answers by rank. Raises ``FwkError`` with a refusal.
    wire: the feature's. block_size: tokens in a block of the KV cache. max_running: sequences that run at once.
    is_host: whether workers compute on the host itself.
    blocks: of the KV cache. num_running: how many sequences run now. moved_by: why K/V leave the engine, or come from
        elsewhere (``FeatureSpec.moves_blocks``). use_policy: ``use_policy(policy, name)`` ranks all who wait by another
    schedule policy, and tells it of all who run; raises ``EngineDead`` where it fails at that, and nothing has changed.

    - ``name``: the feature's.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``plugins``: builds plugins of families that the engine has.
    """

    name: str
    call: Callable[..., list[Any]]
    wire: Wire = Wire()
    options: Any = None
    block_size: int = 16
    max_running: int = 256
    is_host: bool = True
    blocks: Blocks | None = None
    num_running: Callable[[], int] = lambda: 0
    moved_by: str = ""
    plugins: Plugins | None = None
    use_policy: Callable[[SchedulePolicy, str], None] | None = None


class EnginePart(Gate):
    """A feature's part in one engine, on its loop: a step has no time to spare, and what is raised ends the engine.

    Asked and told of the sequences alone that it ``concerns``. As it stands it passes what the server sent on to the
    workers, and of what they answer the newest to the server.

    - ``wants_steps``: whether ``step`` is asked; then no step of its sequences is planned in short.
    """

    def __init__(self, context: EnginePartContext) -> None:
        self.context = context
        self._newest: dict[tuple[str, int], msgspec.Struct] = {}

    @property
    def name(self) -> str:
        """The feature's."""
        return self.context.name

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``ServerPartContext.ask`` can call, by name: between two steps, with plain data.

        An ``InvalidRequest`` refuses. Any other exception is logged, and the caller gets a ``PluginFault``.
        """
        return {}

    def concerns(self, request: Request) -> bool:
        """Whether it has a part in a request; by default one with which the server part sent something."""
        return self.name in request.features

    def asked(self, request: Request) -> Any:
        """What the server part sent with a request, of ``Wire.request``; None if nothing."""
        raw = request.features.get(self.name)
        kind = self.context.wire.request
        return None if raw is None or kind is None else msgspec.msgpack.decode(raw, type=kind)

    def check(self, request: Request) -> None:
        """A request arrives. Raises ``InvalidRequest`` for what cannot be served; then nothing more is heard of it."""

    def left(self, request: Request) -> None:
        """None of its sequences waits or runs any more; or, after ``check``, something else has refused it."""

    def cache_ids(self, request: Request) -> list[int] | None:
        """Its prompt as prefix caches are to know it, as long as it is; None: by its tokens.

        For prompts whose K/V depend on more than their tokens. Ids that are no token's are negative, and of 32 bits.
        """
        return None

    def matchable(self, sequence: FeatureSequence, count: int) -> int:
        """How many of its first ``count`` tokens may come from the prefix cache."""
        return count

    def cached(self, sequence: FeatureSequence, count: int) -> int:
        """It starts for the first time with the K/V of ``count`` tokens: how many the client is told were cached."""
        return count

    def planning(self) -> None:
        """A step is about to be planned, in which sequences that it concerns may have no part."""

    def takes_longer(self) -> bool:
        """Whether the step that was planned takes longer than its tokens tell: nothing is learnt from how long."""
        return False

    def limit(self, sequence: FeatureSequence, start: int, count: int) -> int:
        """How many of ``count`` prompt tokens from ``start`` on may be computed in one step; 0: wait for a larger one.

        A step may be as large as ``FeatureRun.step_tokens`` where no other sequence runs.
        """
        return count

    def restorable(self, sequence: FeatureSequence) -> bool:
        """Whether cache tiers may bring back tokens of it, so that its first step begins anywhere."""
        return True

    def new(self, sequence: FeatureSequence) -> msgspec.Struct | msgspec.Raw | None:
        """The sequence takes a slot: what the workers are told, of ``Wire.sequence``; None: they have no part in it."""
        return sequence.request.features.get(self.name)

    wants_steps: ClassVar[bool] = False

    def step(self, sequence: FeatureSequence, start: int, count: int) -> msgspec.Struct | None:
        """A step computes ``count`` tokens of it from ``start`` on: what the workers are told, of ``Wire.step``."""
        return None

    def took(self, sequence: FeatureSequence, result: Any) -> None:
        """A step made this of the sequence, of ``Wire.result``; the step's tokens are in its text already.

        Where drafts were verified these are the drafts that stand, and the token after them.
        """
        self._newest[sequence.key] = result

    def event(self, sequence: FeatureSequence) -> msgspec.Struct | None:
        """Tokens of the sequence are sent: what goes with them, of ``Wire.event``."""
        return self._newest.pop(sequence.key, None)

    def preempted(self, sequence: FeatureSequence) -> None:
        """It waits again, and starts over later; its blocks are still there."""

    def finished(self, sequence: FeatureSequence) -> None:
        """It has ended, running or waiting; the blocks of one that runs are still there. Its last event comes after."""

    def forget(self, sequence: FeatureSequence) -> None:
        """Nothing more is heard of it."""
        self._newest.pop(sequence.key, None)

    @property
    def is_busy(self) -> bool:
        """Whether the engine must continue to step though nothing is waiting or running."""
        return False

    def stats(self) -> msgspec.Struct | None:
        """Numbers of now, of ``Wire.stats``: counters, and gauges whose names begin with ``num_``. O(1)."""
        return None

    def trouble(self) -> str | None:
        """What goes otherwise than was asked while the engine continues to serve: /health says so. O(1)."""
        return None

    def prove(self, running: Collection[FeatureSequence], waiting: Collection[FeatureSequence]) -> None:
        """With ``--check-blocks``, after every step: raise ``AssertionError`` if its books do not balance."""

    def close(self) -> None:
        """The engine stops."""
