"""Model architectures: 60 to 150 lines each, on ``fwk_layers``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fwk.errors import ConfigError
from fwk.interfaces.declaration import Ask, Declaration, Facts
from fwk.interfaces.pooling import PoolingConfig
from fwk.interfaces.weights_cache import NO_WEIGHTS_CACHE, WeightsCache
from fwk.types import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.attention import AttentionBackend, AttentionLayer
    from fwk.interfaces.expert_placement import ExpertPlacement
    from fwk.interfaces.loader import WeightSource
    from fwk.interfaces.lora import LoRABackend
    from fwk.interfaces.moe import MoERunnerFactory
    from fwk.interfaces.operators import Operators
    from fwk.interfaces.parallel import ParallelGroup
    from fwk.interfaces.quant import Quantization, QuantMethod
    from fwk.interfaces.state import RecurrentState
    from fwk.types import ForwardBatch, ModelConfig


RUNNERS = ("generate", "pool")
"""What can run a model (``ModelSpec.runner``)."""

_HEADS: dict[str, Task] = {
    "ForCausalLM": "generate",
    "LMHeadModel": "generate",
    "ForSequenceClassification": "classify",
    "Model": "embed",
}
"""How transformers names a class that puts a head on a decoder, and one without a head."""


def _stem(architecture: str) -> tuple[str, Task]:
    """The name of a family of classes, and what the class of it is for; an empty task where its name tells nothing."""
    for ending, task in _HEADS.items():
        if architecture.endswith(ending):
            return architecture.removesuffix(ending), task
    return architecture, ""


@dataclass(slots=True)
class ModelContext:
    """What layers and models are built with. Building a layer reads its weights: there is no second load pass.

    ``attention_layers`` collects the layers that need a place in the KV cache, in the order they are built,
    ``recurrent_states`` those that keep a state (``ModelSpec.is_recurrent``). With
    ``lora``, linear layers register there, and adapters change them; a second model in the worker is built without.
    ``is_greedy`` is on the device and holds 1 in steps that need no logit but the largest of each row
    (``QuantMethod.lm_head``). None: no step of this model says so. ``taps`` collects the places where heads may read
    the residual stream, each by the number of layers before it. ``made`` holds what features' parts in the worker keep
    of this model (``WorkerPart.model_context``), by their names.

    - ``config``: of the checkpoint.
    - ``weights``: its tensors.
    - ``dtype``: of weights and activations.
    - ``device``: the worker's.
    - ``quant``: chooses each layer's weight format.
    - ``plain``: for layers that are never quantised
    - ``attention``: the run's backend.
    - ``tp``: the ranks that share each layer.
    - ``max_model_len``: tokens of prompt and output together: the most positions.
    - ``moe_runner``: makes what computes the experts of a layer.
    - ``operators``: norms, rotary positions, gates.
    - ``options``: the model plugin's own, validated; None where it declares none.
    - ``is_greedy``: [1] int64
    - ``state_dtype``: of the part of recurrent layers' states that is summed up; None: float32
    - ``plain_float32``: ``plain``, computing in float32; None where ``plain`` does
    - ``float32_head``: computes LM heads in float32 (``--enable-fp32-lm-head``)
    - ``weights_cache``: what earlier starts packed
    - ``is_deterministic``: a token's numbers must not depend on other tokens, to the bit
    - ``media``: kinds that the run takes: of others, the model need load nothing
    - ``has_encoder``: False: rows of media come from another process, and what makes them need not be loaded
    - ``ep_size``: by how many the experts of a layer are divided; it divides ``tp.size``
    - ``expert_placement``: None: ranks hold equal ranges of a layer's experts
    """

    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype
    device: torch.device
    quant: Quantization
    plain: QuantMethod
    attention: AttentionBackend
    tp: ParallelGroup
    max_model_len: int
    moe_runner: MoERunnerFactory
    operators: Operators
    options: Any = None
    lora: LoRABackend | None = None
    attention_layers: list[AttentionLayer] = field(default_factory=list["AttentionLayer"])
    is_greedy: Tensor | None = None
    recurrent_states: list[RecurrentState] = field(default_factory=list["RecurrentState"])
    taps: dict[int, HiddenTap] = field(default_factory=dict[int, "HiddenTap"])
    state_dtype: torch.dtype | None = None
    plain_float32: QuantMethod | None = None
    float32_head: QuantMethod | None = None
    weights_cache: WeightsCache = NO_WEIGHTS_CACHE
    is_deterministic: bool = False
    media: frozenset[str] = frozenset()
    has_encoder: bool = True
    ep_size: int = 1
    expert_placement: ExpertPlacement | None = None
    made: dict[str, Any] = field(default_factory=dict[str, Any])

    def encodes(self, kind: str) -> bool:
        """Whether ``Model.encode`` is asked for media of this kind."""
        return kind in self.media and self.has_encoder

    @property
    def layers(self) -> range:
        """Those of the model's layers that this worker computes: all, or those of its stage."""
        return self.tp.stage.layers(self.config.num_layers)


class HiddenTap(Protocol):
    """A place where a model's residual stream may be read and changed (``fwk_layers.HiddenTap``).

    value: the stream of the last step that was computed, [num_tokens, hidden_size]; None where it is not wanted.
    changes: each is called with a tensor [num_tokens, hidden_size] in every step whose layers are called; what it adds
    to that in place is added to the stream.

    - ``is_wanted``: whether ``value`` is to be kept.
    """

    is_wanted: bool
    value: Tensor | None
    changes: list[Callable[[Tensor], None]]


class TokenPredictor(ABC):
    """A checkpoint's own head for the token after the next one (multi-token prediction, arXiv:2412.19437, 2.2)."""

    @abstractmethod
    def forward(self, embedded: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states of the wanted tokens: [num_hidden, hidden_size].

        Row i is made of token t's hidden state (``Model.forward``'s, or this one's) and of the embedding of the token
        after t, [num_tokens, hidden_size] each; its K and V stand at t's place.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size]: of the token after the one that was embedded."""


class Encoder(ABC):
    """A model on one device that does not generate: of whole sequences it makes hidden states, and keeps nothing.

    One vector is made of a sequence's hidden states: by ``pool``, or as ``Checkpoint.pooling`` says. A decoder
    (``Model``) that is served for another task than ``generate`` runs as one, with its K/V in the cache for the step.
    """

    @abstractmethod
    def __init__(self, context: ModelContext) -> None: ...

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens: [num_tokens, hidden_size]. Every sequence of the batch is whole."""

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor | Sequence[Tensor] | None:
        """The sequences' vectors, [num_seqs, ``ModelSpec.vector_size``] float32; None: as the checkpoint says.

        Of a model that makes a vector of each token: a tensor [num_tokens_of_it, vector_size] for each sequence.
        A sequence's vectors may depend on its own tokens alone.
        """
        return None


class Model(ABC):
    """A model on one device.

    - ``prunes_last_layer``: whether ``forward`` returns the tokens of ``batch.hidden_indices`` alone; core sets that
      for such models only.
    - ``divides_layers``: whether it builds ``ModelContext.layers`` alone, and in stages hands hidden states from one to
      the next (``fwk_layers.Border``). What ``forward`` returns is read in the last stage, and ``logits`` called there.
    """

    prunes_last_layer: ClassVar[bool] = False
    divides_layers: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, context: ModelContext) -> None: ...

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens: [num_tokens, hidden_size].

        Where ``prunes_last_layer`` is set and ``batch.hidden_indices`` is not None, of those tokens:
        [num_hidden, hidden_size]. For the others the last layer only stores K and V:
        ``fwk_layers.SelectTokens`` and ``Attention`` do that.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], only for the tokens that need them."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first layer gets of tokens: [n] int64 to [n, hidden_size]. Heads that draft read it."""
        raise ConfigError(f"the model {type(self).__name__} has no embed(), which a head that drafts for it reads")

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Rows that take the place of media's tokens: [length, hidden_size] for each item, on the device.

        kind: one of ``ModelSpec.media``. items: the arrays that a multimodal processor made of each. A row may depend
        on its item alone. Of a batch in which such tokens are, ``inserted`` has their rows (``fwk_layers.insert``).
        """
        raise ConfigError(f"the model {type(self).__name__} has no encode(): it takes text only")

    def make_predictors(self, context: ModelContext) -> Sequence[TokenPredictor]:
        """The checkpoint's heads for further tokens, in their order. Built on demand, with a context of their own.

        Raises ``ModelLoadError`` when what the config announces is not in the checkpoint.
        """
        return ()


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of the attention backend: the size and number of K/V heads, and features.

    - ``head_size``: numbers in a head of K.
    - ``num_kv_heads``: of the whole model.
    - ``features``: in the words of ``AttentionBackendSpec.features``.
    """

    head_size: int
    num_kv_heads: int
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """How a model with an encoder reads a prompt: the encoder all of it, and the decoder begins with ``start``.

    num_tokens: the encoder reads so many, which are media's; the decoder begins with those behind them and ``start``.
    """

    start: tuple[int, ...] = ()
    num_tokens: int | None = None

    def max_added(self, block_size: int) -> int:
        """Places in the K/V of a sequence beyond its prompt and output: the decoder's begin with a block."""
        return block_size - 1 + len(self.start)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Declaration):
    """Declares a model implementation.

    architectures: values of config.json's ``architectures`` it serves. One that generates serves the decoder's other
        classes, too: ``XModel`` to embed and ``XForSequenceClassification`` to classify, where ``XForCausalLM`` is one.
    task: what it is for (``--task``): ``generate``, ``embed``, ``classify``, or a word of its own.
    runner: what runs it. ``generate``: ``load`` names a ``Model``, which writes token after token. ``pool``: ``load``
        names an ``Encoder``, which makes one vector of each prompt. Empty: ``pool`` for all tasks but ``generate``.
    is_recurrent: some of its layers keep a state (``fwk_layers.RecurrentState``) instead of K/V.
    media: kinds of media that its ``Model.encode`` takes: ``image``, ``audio``, ``video``.
    features: what it asks of the attention backend whatever its config says (``soft_cap``, ``latent``); what depends
    on the config is said by ``attention_needs``.
    """

    family: ClassVar[str] = "models"

    architectures: tuple[str, ...]
    task: Task = "generate"
    runner: str = ""
    is_recurrent: bool = False
    media: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.runner:
            object.__setattr__(self, "runner", "generate" if self.task == "generate" else "pool")
        if self.runner not in RUNNERS:
            raise ValueError(f"{self.name!r}: runner must be {' or '.join(RUNNERS)}, not {self.runner!r}")

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json as ``ModelConfig.from_dict`` reads it, for architectures that nest or name fields otherwise.

        Called once for the plugin that serves ``architectures``, before anything else is read of the configuration.
        Raises ``ModelLoadError`` naming the key for what the model cannot compute.
        """
        return raw

    def tasks_of(self, architecture: str) -> tuple[Task, ...]:
        """What it can be served for, the checkpoint's own purpose first; empty: it does not serve the architecture."""
        if architecture in self.architectures:
            return (self.task, "embed", "classify") if self.runner == "generate" else (self.task,)
        task = _stem(architecture)[1]
        return (task,) if self.decoder_of(architecture) and task not in ("", "generate") else ()

    def decoder_of(self, architecture: str) -> str | None:
        """The architecture it serves that another class of the same decoder belongs to, if there is one."""
        stem = _stem(architecture)[0]
        return next((x for x in self.architectures if _stem(x)[0] == stem), None) if self.runner == "generate" else None

    def runner_of(self, task: Task) -> str:
        """What runs it for a task: a decoder that is not to generate makes one vector of each prompt."""
        return self.runner if task == self.task else "pool"

    def vector_size(self, config: ModelConfig) -> int:
        """Numbers in the vector of a sequence, of models that do not generate."""
        return len(config.labels) if self.task == "classify" else config.hidden_size

    def pooling(self, task: Task) -> PoolingConfig:
        """How hidden states become one vector where the checkpoint does not say."""
        return PoolingConfig("last", normalize=task == "embed") if self.runner == "generate" else PoolingConfig()

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        """What attention must do for a model of this config; asked before anything heavy is loaded."""
        features = self.features | ({"sliding_window"} if config.sliding_window is not None else set[str]())
        return AttentionNeeds(config.head_size, config.num_kv_heads, features)

    def encoder_input(self, config: ModelConfig) -> EncoderInput | None:
        """Where an encoder reads the prompt, what its decoder begins with (``ForwardBatch.encoder_lens_np``).

        Raises ``ModelLoadError`` where the config does not say.
        """
        return None

    def refusal(self, facts: Facts) -> str | None:
        if not self.tasks_of(facts.architecture):
            return f"serves {', '.join(self.architectures)}, not {facts.architecture}"
        return self.refusal_of_run(facts)

    def refusal_of_run(self, facts: Facts) -> str | None:
        """``refusal``, whatever the architecture."""
        tasks = self.tasks_of(facts.architecture) or (self.task,)
        if facts.task and facts.task not in tasks:
            return f"is a model to {' or '.join(tasks)}, this run is to {facts.task}"
        return super().refusal(facts)

    def is_meant_for(self, facts: Facts) -> bool:
        tasks = self.tasks_of(facts.architecture)
        return bool(tasks) and facts.task in ("", *tasks)

    def asks_of(self, facts: Facts, options: Any) -> tuple[Ask, ...]:
        needed = self.attention_needs(facts.model).features if facts.model is not None else self.features
        return (*self.asks, Ask("attention", needed)) if needed else self.asks

    def facts_with(self, facts: Facts, options: Any) -> Facts:
        facts = super().facts_with(facts, options)
        if facts.model is None:
            return facts
        needs = self.attention_needs(facts.model)
        num_heads = facts.model.num_heads
        return replace(facts, head_size=needs.head_size, num_heads=num_heads, num_kv_heads=needs.num_kv_heads)
