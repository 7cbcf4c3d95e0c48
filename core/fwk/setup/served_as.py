"""What a model is served for, and how a model that does not generate makes vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from fwk.config import ModelOptions
from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.model import EncoderInput, ModelSpec
from fwk.plugins.selection import AUTO
from fwk.types import ModelConfig, PoolingConfig, Task


@dataclass(frozen=True, slots=True)
class ServedAs:
    """A task, what runs the model for it, and the vectors it makes of prompts."""

    task: Task = "generate"
    runner: str = "generate"  # ``ModelSpec.runner_of`` the task
    is_decoder: bool = True  # what ``ModelSpec.load`` names is a ``Model``
    is_recurrent: bool = False  # ``ModelSpec.is_recurrent``
    vector_size: int = 0  # of what a pooling model makes; 0 for one that generates
    pooling: PoolingConfig | None = None  # of a pooling model
    says_pooling: bool = False  # an option or the checkpoint says it, not the plugin
    labels: tuple[str, ...] = ()  # of a classifier's outputs
    encoder: EncoderInput | None = None  # an encoder reads the prompt, a decoder writes
    media: frozenset[str] = frozenset()  # kinds of media that prompts may have

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a prompt's tokens must be computed together: the last one's hidden state alone needs only K/V."""
        if self.encoder is not None:
            return True
        reads_last = self.task == "classify" or (self.pooling is not None and self.pooling.kind == "last")
        return self.runner == "pool" and not (self.is_decoder and reads_last)


def served_as(
    options: ModelOptions, spec: ModelSpec | None, config: ModelConfig, stored: PoolingConfig | None
) -> ServedAs:
    """Decide it by ``--task``, or by what the checkpoint was made for.

    spec: None where no plugin serves the model, which is reported when plugins are chosen. stored: what the checkpoint
    says of pooling. Raises ``ConfigError`` or ``ModelLoadError`` for what cannot be.
    """
    if spec is None:
        return ServedAs()
    tasks = spec.tasks_of(config.architecture) or (spec.task,)
    task = options.task
    if task == AUTO:
        task = "embed" if stored is not None and "embed" in tasks else tasks[0]
    runner = spec.runner_of(task)
    if runner == "pool" and spec.encoder_input(config) is not None:
        raise ConfigError(f"--task {task}: {options.model} has an encoder and a decoder, which generate together")
    labels = _labels(options, spec, task, config)
    if runner != "pool":
        if options.pooling_type != AUTO:
            raise ConfigError("--pooling-type: this model generates text; --task embed makes vectors of prompts")
        media = spec.media if options.enable_multimodal else frozenset[str]()
        return ServedAs(task, runner, is_recurrent=spec.is_recurrent, encoder=spec.encoder_input(config), media=media)
    is_decoder = spec.runner == "generate"
    if is_decoder:
        _check_causal(config)
    vector_size = len(labels) if is_decoder and task == "classify" else spec.vector_size(config)
    says = stored is not None or options.pooling_type != AUTO
    pooling = _pooling(options, spec, task, stored)
    return ServedAs(task, runner, is_decoder, spec.is_recurrent, vector_size, pooling, says, labels)


def _labels(options: ModelOptions, spec: ModelSpec, task: Task, config: ModelConfig) -> tuple[str, ...]:
    tokens = options.classifier_from_token
    has_head = config.architecture not in spec.architectures or spec.runner == "pool"
    if tokens and (task != "classify" or has_head or len(tokens) > 2):
        raise ConfigError(
            "--classifier-from-token takes one or two tokens, with --task classify, for a model that generates text"
        )
    if task != "classify":
        return ()
    if not (tokens or has_head):
        raise ConfigError(
            f"--task classify: {options.model} has no layer to classify with; --classifier-from-token no yes scores by "
            "the logits of tokens"
        )
    return (tokens[-1],) if tokens else config.labels


def _check_causal(config: ModelConfig) -> None:
    """Refuse decoders that were trained again to see what follows: their vectors would be silently wrong."""
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.raw.get(key) == value:
            raise ModelLoadError(
                f"config.json: {key} is {str(value).lower()}: every token of this model sees the whole prompt, which "
                "decoders do not compute here"
            )


def _pooling(options: ModelOptions, spec: ModelSpec, task: Task, stored: PoolingConfig | None) -> PoolingConfig:
    kind = options.pooling_type
    if kind == AUTO:
        return stored or spec.pooling(task)
    if task == "classify":
        raise ConfigError("--pooling-type is for models that embed: a classifier's layer says what it reads")
    return replace(stored or spec.pooling(task), kind=cast("str", kind))
