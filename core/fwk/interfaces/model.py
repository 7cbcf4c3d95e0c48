"""Model architectures: 60 to 150 lines each, on ``fwk.layers``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Ask, Declaration, Facts
from fwk.types import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.attention import AttentionBackend, AttentionLayer
    from fwk.interfaces.loader import WeightSource
    from fwk.interfaces.lora import LoRABackend
    from fwk.interfaces.moe import MoERunnerFactory
    from fwk.interfaces.operators import Operators
    from fwk.interfaces.parallel import ParallelGroup
    from fwk.interfaces.quant import Quantization, QuantMethod
    from fwk.types import ForwardBatch, ModelConfig


RUNNERS = ("generate", "pool")
"""What can run a model (``ModelSpec.runner``)."""


@dataclass(slots=True)
class ModelContext:
    """What layers and models are built with. Building a layer reads its weights: there is no second load pass.

    ``attention_layers`` collects the layers that need a place in the KV cache, in the order they are built. With
    ``lora``, linear layers register there, and adapters change them; a second model in the worker is built without.
    ``is_greedy`` is on the device and holds 1 in steps that need no logit but the largest of each row
    (``QuantMethod.lm_head``). None: no step of this model says so.
    """

    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype
    device: torch.device
    quant: Quantization
    plain: QuantMethod  # for layers that are never quantised
    attention: AttentionBackend
    tp: ParallelGroup
    max_model_len: int
    moe_runner: MoERunnerFactory
    operators: Operators
    options: Any = None
    lora: LoRABackend | None = None
    attention_layers: list[AttentionLayer] = field(default_factory=list["AttentionLayer"])
    is_greedy: Tensor | None = None  # [1] int64


class Encoder(ABC):
    """A model on one device that does not generate: of whole sequences it makes hidden states, and keeps nothing.

    One vector is made of a sequence's hidden states: by ``pool``, or by core as ``Checkpoint.pooling`` says.
    """

    @abstractmethod
    def __init__(self, context: ModelContext) -> None: ...

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens: [num_tokens, hidden_size]. Every sequence of the batch is whole."""

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor | None:
        """The sequences' vectors, [num_seqs, ``ModelSpec.vector_size``] float32; None to have core make them.

        A sequence's vector may depend on its own tokens alone.
        """
        return None


class Model(ABC):
    """A model on one device."""

    prunes_last_layer: ClassVar[bool] = False
    """Whether ``forward`` returns the tokens of ``batch.hidden_indices`` alone; core sets that for such models only."""

    @abstractmethod
    def __init__(self, context: ModelContext) -> None: ...

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens: [num_tokens, hidden_size].

        Where ``prunes_last_layer`` is set and ``batch.hidden_indices`` is not None, of those tokens:
        [num_hidden, hidden_size]. For the others the last layer only stores K and V:
        ``fwk.layers.SelectTokens`` and ``Attention`` do that.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], only for the tokens that need them."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of the attention backend: the size and number of K/V heads, and features."""

    head_size: int
    num_kv_heads: int
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Declaration):
    """Declares a model implementation.

    architectures: values of config.json's ``architectures`` it serves.
    task: what it is for (``--task``): ``generate``, ``embed``, ``classify``, or a word of its own.
    runner: what runs it. ``generate``: ``load`` names a ``Model``, which writes token after token. ``pool``: ``load``
        names an ``Encoder``, which makes one vector of each prompt. Empty: ``pool`` for all tasks but ``generate``.
    features: what it asks of the attention backend whatever its config says (``soft_cap``, ``latent``); what depends
    on the config is said by ``attention_needs``.
    """

    family: ClassVar[str] = "models"

    architectures: tuple[str, ...]
    task: Task = "generate"
    runner: str = ""
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

    def vector_size(self, config: ModelConfig) -> int:
        """Numbers in the vector of a sequence, of models that do not generate."""
        return config.hidden_size

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        """What attention must do for a model of this config; asked before anything heavy is loaded."""
        features = self.features | ({"sliding_window"} if config.sliding_window is not None else set[str]())
        return AttentionNeeds(config.head_size, config.num_kv_heads, features)

    def refusal(self, facts: Facts) -> str | None:
        if facts.architecture not in self.architectures:
            return f"serves {', '.join(self.architectures)}, not {facts.architecture}"
        return self.refusal_of_run(facts)

    def refusal_of_run(self, facts: Facts) -> str | None:
        """``refusal``, whatever the architecture."""
        if facts.task and facts.task != self.task:
            return f"is a model to {self.task}, this run is to {facts.task}"
        return super().refusal(facts)

    def is_meant_for(self, facts: Facts) -> bool:
        return facts.architecture in self.architectures and facts.task in ("", self.task)

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
