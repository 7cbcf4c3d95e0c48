"""What the parts of a feature have in common: what they send one another, and what is known of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fwk.config import Config
from fwk.interfaces.declaration import Declaration
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.model import ModelSpec
from fwk.types import ModelConfig

Ask = Callable[..., Awaitable[Any]]
"""``await ask(operation, *args)`` runs an operation of engine parts: ``ServerPartContext.ask``."""


class Plugins(Protocol):
    """Builds plugins of other families for a feature's part, as core does for itself."""

    def build(self, plugin: Any, context: Callable[..., object], **fields: Any) -> Any:
        """The object of the plugin that the run has chosen from family ``plugin``, of ``context(**fields, options=)``.

        Raises ``PluginLoadError``, or the plugin's own ``FwkError``.
        """
        ...

    def build_all(self, family: str, context: Callable[..., object], **fields: Any) -> Iterator[tuple[Any, Any]]:
        """Each plugin of a family of which all take part, best rank first: its declaration, and its object."""
        ...

    def items(self, family: str) -> Sequence[Any]:
        """What is installed of a family, best rank first: ``name``, ``version``, ``label`` and ``declaration`` each.

        ``build`` takes one in place of the family. In the server and its jobs.
        """
        ...

    def find(self, family: str, name: str) -> Any:
        """What is installed of a family under a name, one of ``items``. Raises ``PluginError``, which says what is."""
        ...

    def load(self, item: Any) -> Any:
        """Import the class that one of ``items`` names. Raises ``PluginLoadError`` for a broken one."""
        ...

    def joining(self, item: Any, options: Mapping[str, object]) -> Callable[..., Any]:
        """``joining(item, options)(context, **fields)`` builds what takes part from now on, with options of its own.

        Raises ``ConfigError`` for options that do not fit, ``InvalidRequest`` for those that leave it off, and
        ``PluginError`` where it cannot join the run; in a server, of what runs in engines they alone know that.
        """
        ...

    def choose(self, family: str, name: str, context: Callable[..., object], **fields: Any) -> Any:
        """The object of a family's plugin of that name, or for ``auto`` of the best one that can serve the run.

        In a worker, which shows it at /server_info. Raises ``PluginError``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """What a feature's parts send one another: classes derived from ``msgspec.Struct``; None: nothing.

    request: from the server to the engine, with a request. sequence: from the engine to the workers, as a sequence
    takes its slot. step: the same, with a step of a sequence. result: back, for a sequence of a step. event: from the
    engine to the server, with tokens of a sequence. stats: numbers of the engine's part, each with a default; metrics
    ``fwk:NUMBER``, or ``fwk:FEATURE_NUMBER`` where something else has that name.
    """

    request: type[msgspec.Struct] | None = None
    sequence: type[msgspec.Struct] | None = None
    step: type[msgspec.Struct] | None = None
    result: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    stats: type[msgspec.Struct] | None = None


@dataclass(frozen=True, slots=True)
class PromptModel:
    """A model that is not to generate.

    - ``name``: as the user gave it.
    - ``spec``: the declaration of the plugin that computes it.
    - ``config``: the model's.
    - ``task``: what it is served for.
    - ``checkpoint``: where it is read from.
    """

    name: str
    spec: ModelSpec
    config: ModelConfig
    task: str
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class PromptsServed:
    """What a feature makes of the prompts of a model that does not generate.

    vector_size: numbers of a vector, one of each prompt, or of each token (``has_token_vectors``). labels: of the
    numbers, where they are scores. needs_whole_prompts: a prompt's tokens must be computed together. max_length: the
    longest input that the model was made for. notes: a sentence for each choice that the user may not expect.
    settings: the feature's own, for its other parts.
    """

    vector_size: int = 0
    labels: tuple[str, ...] = ()
    has_token_vectors: bool = False
    needs_whole_prompts: bool = True
    max_length: int | None = None
    notes: tuple[str, ...] = ()
    settings: Any = None


@dataclass(frozen=True, slots=True)
class StatesKept:
    """How many states of recurrent layers are kept.

    max_rows: one of each of --max-running-requests, and those for the prefix cache; None: as many as the free memory
        holds.
    interval: generated tokens after which a sequence's is kept for the prefix cache again.
    """

    max_rows: int | None = None
    interval: int = 256


class StepPace(Protocol):
    """How many tokens of prompts steps take while sequences decode. Both are called in each step: O(1)."""

    def room(self, num_decoding: int, budget: int, num_soon: int = 0) -> int:
        """Tokens of prompts, of ``budget``, for a step in which ``num_decoding`` sequences decode.

        num_soon: sequences that would if all prompts were computed.
        """
        ...

    def took(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of so many took ``seconds`` in the worker."""
        ...


@dataclass(frozen=True, slots=True)
class StepPlanning:
    """How steps are planned.

    max_start_tokens: of prompts in a step, from which it starts no further one; None: the device's.
    max_decode_gap: a step with a prompt takes at most so many times one without; 0: no bound; None: the device's.
    pace: makes what keeps to a ``max_decode_gap``; None: no step is bound so.
    max_prompts: in a step, from which it starts no further one.
    is_mixed: prompts and next tokens share steps.
    conservativeness: blocks kept free for each running sequence when another one starts.
    admission_interval: steps from one look at the waiting queue to the next, while sequences run.
    """

    max_start_tokens: int | None = None
    max_decode_gap: float | None = None
    pace: Callable[[float], StepPace] | None = None
    max_prompts: int | None = None
    is_mixed: bool = True
    conservativeness: float = 1.0
    admission_interval: int = 1


@dataclass(frozen=True, slots=True)
class FeatureRun:
    """A run whose plugins are settled, before its weights are read: what ``FeatureSpec.check_run`` goes by.

    model: as the user gave it. runner: ``generate`` or ``pool``. is_recurrent, has_encoder, media: of the model.
    chosen: what was settled, by family. features: the names of those that are on. one_server: what the user gave to
    turn on those that have ``FeatureSpec.one_server``, and why. items: as ``Plugins.items``.

    - ``config``: all options of the run.
    - ``prompts``: of a model that does not generate.
    - ``is_local``: whether all workers are on this machine.
    - ``model_config``: of the model; None: not known.
    - ``step_tokens``: that a step computes at most.
    - ``task``: what the model is served for.
    """

    config: Config
    model: str
    runner: str = "generate"
    is_recurrent: bool = False
    has_encoder: bool = False
    media: frozenset[str] = frozenset()
    chosen: Mapping[str, Declaration] = field(default_factory=dict[str, Declaration])
    features: frozenset[str] = frozenset()
    one_server: Mapping[str, str] = field(default_factory=dict[str, str])
    prompts: PromptsServed | None = None
    is_local: bool = True
    model_config: ModelConfig | None = None
    step_tokens: int = 0
    items: Callable[[str], Sequence[Any]] = lambda family: ()
    task: str = "generate"
