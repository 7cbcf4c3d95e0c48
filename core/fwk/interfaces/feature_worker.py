"""The part of a feature in each worker, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from fwk.errors import BlameSequence
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.declaration import Declaration
from fwk.interfaces.device import Event, NoEvent
from fwk.interfaces.feature_common import Plugins, PromptsServed, Wire
from fwk.interfaces.grammar import Grammar
from fwk.interfaces.model import Encoder, HiddenTap, Model, ModelContext
from fwk.interfaces.native import NO_THREADS, NativeThreads
from fwk.interfaces.sampling import LogitsProcessor
from fwk.types import Batch, ForwardBatch, NewSequence, StepResult

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from fwk.interfaces.drafting import DraftingMaker, DraftTarget
    from fwk.interfaces.grammar_masks import GrammarProcessor, Mask
    from fwk.interfaces.graphs import StepPieces
    from fwk.interfaces.sampling import SamplingContext
    from fwk.interfaces.step import SequenceRecords


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """A model that a worker is about to build.

    role: in this run; ``encoder``: the served one without layers (``ServerPartContext.encoder``). loader: the plugin
    that reads it. can_reread: whether its weights can be read again while it serves, as those in files can. path: of
    its files. threads: run native operators. identity: a hash of all that the weights depend on as this worker's layers
    will hold them, but for the versions of kernels and of layers' code; to be asked once the model is being built.
    read_since: names of the checkpoint's tensors that were read or skipped after so many others.
    """

    role: Literal["served", "draft", "head", "encoder"]
    loader: str = ""
    can_reread: bool = True
    path: Path = Path()
    threads: NativeThreads = NO_THREADS
    identity: Callable[[], str] = lambda: ""
    read_since: Callable[[int], Sequence[str]] = lambda count: ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model, as a worker has built it.

    taps: by the number of layers before them, the places where its residual stream may be changed, by functions
    appended to ``HiddenTap.changes``; empty for a model without. made: ``ModelContext.made``.

    - ``model``: as ``ModelSpec.load`` made it.
    """

    model: Model | Encoder
    taps: Mapping[int, HiddenTap]
    made: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """A worker's KV cache, as it was allocated.

    layers: with K/V of their own (``kv_cache``: [num_blocks, *block_shape], on the device; ``kv_spec``: their format).
    in_common: what a worker of this rank must have in common with another, perhaps on another machine, for blocks of
        the one to be blocks of the other, by the words that a message calls it by; it waits for the hash of the model's
        files (``FeatureSpec.moves_blocks`` starts it early).
    identity: 32 bytes that differ whenever the bytes of a block would mean something else: model, precision, layout,
        rank; ``identity(True)``: for blocks that another process may read, or a later one, with the hash of the files.

    - ``num_blocks``: of the cache.
    - ``block_size``: tokens in a block.
    """

    layers: Sequence[AttentionLayer]
    num_blocks: int
    block_size: int
    in_common: Callable[[], Mapping[str, str]]
    identity: Callable[[bool], bytes] = lambda outlives: b""


class ModelRebuild(Protocol):
    """Builds the served model anew, alongside the one that serves, and puts it in its place.

    It is built as at the start, by the same loader, quantizers and layers: its tokens are those of a fresh start, and
    what refuses a checkpoint there refuses it here.
    """

    def build(self, model: str, load_format: str | None) -> tuple[str, Any]:
        """A fingerprint of a checkpoint's files, and the model with its weights; load_format: None for the start's.

        Raises what opening and loading raise, memory that is not there among it: what serves is whole.
        """
        ...

    def serve(self, built: Any) -> None:
        """Use it from the next step on, with new K/V and states: nothing may run."""
        ...

    def trim(self) -> None:
        """Give back what a model took that is used no more."""
        ...


class Processors(Protocol):
    """The logits processors of a worker whose steps choose tokens."""

    def build(self, name: str, options: Mapping[str, object]) -> LogitsProcessor:
        """The processor of a name with these options, not yet in use. Raises ``FwkError``."""
        ...

    def use(self, name: str, processor: LogitsProcessor | None) -> None:
        """Use it for the sequences to come in place of the one of that name; None: use none. Others keep theirs."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerPartContext:
    """What a worker part is built with, before the model is.

    rank: of ``size`` workers that compute a model together. dtype: of the model. plugins: builds plugins of families
    that compute. send: brings an array to the device without waiting.
    to_host: begins a tensor's copy into the host's memory, which is whole when ``WorkerPart.results`` is called; on the
    host it is the tensor itself. grammar: that of the sequence in a slot, after its tokens that are sure, to be asked
    and not advanced; None without one, and where only the end may follow. rebuild: for operations, once the model
    serves. host_buffer: ``host_buffer(shape, dtype=)``, zeros in the host's memory, with which the device copies
    without waiting. event: a new mark in the order of the device's work. chosen: the plugins that were settled, by
    family. hash_files: begins to hash the model's files, which takes as long as reading them. processors: those of the
    worker, once the model serves; None where no step chooses a token.

    - ``name``: the feature's.
    - ``device``: the worker's.
    - ``wire``: the feature's.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``is_host``: whether the device is the host itself.
    - ``num_slots``: most sequences at once.
    - ``vocab_size``: width of the logits.
    - ``hidden_size``: numbers in a hidden state.
    - ``num_layers``: of the model, all kinds counted.
    - ``step_tokens``: that a step computes at most.
    - ``prompts``: of a model that does not generate.
    - ``encode``: text to token ids, without special tokens.
    - ``inputs``: kinds besides text that prompts may have.
    """

    name: str
    device: torch.device
    send: Callable[[np.ndarray], Tensor]
    to_host: Callable[[Tensor], Tensor]
    wire: Wire = Wire()
    options: Any = None
    is_host: bool = True
    rank: int = 0
    size: int = 1
    num_slots: int = 256
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    step_tokens: int = 0
    dtype: torch.dtype | None = None
    plugins: Plugins | None = None
    grammar: Callable[[int], Grammar | None] = lambda slot: None
    prompts: PromptsServed | None = None
    encode: Callable[[str], list[int]] = lambda text: []
    inputs: frozenset[str] = frozenset()
    rebuild: ModelRebuild | None = None
    host_buffer: Callable[..., Tensor] | None = None
    event: Callable[[], Event] = NoEvent
    chosen: Mapping[str, Declaration] = field(default_factory=dict[str, Declaration])
    hash_files: Callable[[], None] = lambda: None
    processors: Callable[[], Processors | None] = lambda: None


class StepRunner(Protocol):
    """Runs a worker's steps: several may be launched before the first of them is collected, in their order."""

    def launch(self, batch: Batch) -> Any:
        """Begin a step. Returns what ``collect`` takes."""
        ...

    def collect(self, pending: Any) -> StepResult:
        """Wait for a step, also for one that was lost as it was launched."""
        ...

    def settle(self) -> None:
        """An operation is about to be run between two steps."""
        ...


class WorkerPart:
    """A feature's part in each worker. Has a part in the steps in which one of its sequences has one.

    - ``graphs``: ``eager``: such a step is computed by calling the model's layers, not replayed from a capture.
    - ``needs_lengths``: whether it goes by ``ForwardBatch.seq_lens_np``: then no step of its sequences is launched
      while drafts of them are being verified, of which some may count there that are rejected.
    """

    graphs: ClassVar[Literal["any", "eager"]] = "any"
    needs_lengths: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "grammars" in vars(cls):
            raise TypeError(f"{cls.__qualname__}.grammars is not called any more: implement WorkerPart.masks")

    def __init__(self, context: WorkerPartContext) -> None:
        self.context = context

    def calls_layers(self, batch: Batch) -> bool:
        """Whether a step in which it has a part must be computed by calling the layers; by default, as ``graphs`` says.

        Asked before ``inputs``, of steps in which more changes than that each sequence has one more token.
        """
        return self.graphs == "eager"

    def kept_bytes(self, takes: frozenset[str]) -> int:
        """What it may keep in memory besides; asked before the model is built. takes: ``ModelContext.media``."""
        return 0

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``EnginePartContext.call`` can call, by name: between two steps, with plain data.

        An ``FwkError`` refuses. Any other exception is logged, and the caller gets a ``PluginFault``.
        """
        return {}

    def around_captures(self) -> AbstractContextManager[None]:
        """Steps are captured within, on a device that captures each of some sizes by itself."""
        return nullcontext()

    def pieces(self, attention: AttentionBackend) -> StepPieces | None:
        """What replays steps with prompts on a device, cut where models call attention; None: it does not."""
        return None

    def masks(self, context: SamplingContext, table: SequenceRecords, mask: Mask) -> GrammarProcessor | None:
        """What keeps the sequences of a table inside their grammars; None: nothing does.

        Asked where a grammar backend is chosen, once the model is built.
        """
        return None

    def drafting(self, target: DraftTarget) -> DraftingMaker | None:
        """What makes and verifies drafts of a model that generates; None: nothing.

        Asked once it is built, before its KV cache is: layers that draft join it. Raises ``FwkError``.
        """
        return None

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        """A model is about to be built: complete what it is built with, and keep in ``context.made`` what is its own.

        Asked for the served model, again for one with other weights, which may be discarded, and for what drafts.
        Returns what tells apart the weights that workers then hold, for the cache of packed ones; empty: nothing is
        changed. Raises ``FwkError`` for a model that it cannot go with.
        """
        return ""

    def model_loaded(self, loaded: LoadedModel) -> None:
        """The model is there, the KV cache is not yet; and again, when it was built anew with other weights."""

    def cache_allocated(self, cache: WorkerCache) -> None:
        """The KV cache is there; nothing has run yet. Raises ``ConfigError`` for one that does not do."""

    def around(self, runner: StepRunner) -> StepRunner:
        """What runs the steps in the runner's place, and has it run them; the runner itself: nothing is to be done.

        Asked once the model is to serve; what it raises ends the engine.
        """
        return runner

    def rehearsal(self) -> Sequence[msgspec.Struct]:
        """The largest step is about to be run, to see what memory it takes: hold as much as its sequences can ask for.

        Returns what its sequences are told, in turn, of ``Wire.sequence``; none: it has no part in that step.
        """
        return ()

    def rehearsed(self) -> None:
        """That was it: forget what was held for it."""

    def warmed_up(self) -> None:
        """Steps from here on are of requests, until other weights are loaded."""

    def next_tokens(self, slot: int) -> Sequence[int]:
        """What comes next in the sequence of a slot, as far as that is known, after its tokens that are sure.

        Asked after a step that chose tokens of it. They are verified in one step, in place of a decoder's drafts that
        begin otherwise, and are drafts and no more: the model may pick others.
        """
        return ()

    def between_steps(self) -> None:
        """A step of any sequences was launched, and the next one was not; all ranks are at the same step.

        Engines wait for it. What it raises ends the engine.
        """

    def begin(self, new: NewSequence, asked: Any) -> None:
        """A sequence takes slot ``new.slot``. asked: of ``Wire.sequence``. Raises ``BlameSequence`` to refuse it."""

    def forget(self, slot: int) -> None:
        """It has left the slot."""

    def wants_hidden(self, slots: np.ndarray) -> bool:
        """Whether all layers must compute all tokens of a step of the sequences in ``slots``, [num_seqs] int64.

        Else the last one may leave out those that are not sampled after; ``computed`` then sees of some tokens alone.
        """
        return False

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        """Before the pass; ``forward.extras`` is the place for what layers are to find, ``inserted`` for rows.

        One that reads logits sets ``forward.is_greedy`` to False: else any but a row's largest may be -inf.
        """

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> Any:
        """After the pass, on the device: never waits for it. Returns what ``results`` needs; None: nothing comes of it.

        hidden: what logits are made of, [num_tokens, hidden_size] if ``wants_hidden``, else of some tokens. logits:
        [num_rows, vocab_size], before any processor; None where no token is chosen. Both are gone when this returns.
        Rows are those of each sequence that ``samples``, in their order: after its sure tokens, and after each draft.
        """
        return None

    def results(self, made: Any) -> Mapping[int, msgspec.Struct | BlameSequence]:
        """The step has come back. made: of ``computed``. By slot, what the engine is told, of ``Wire.result``.

        A ``BlameSequence`` fails the sequence, and no other.
        """
        return {}

    def close(self) -> None:
        """The worker stops: within a second."""
