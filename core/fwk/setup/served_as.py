"""What a model is served for."""

from __future__ import annotations

from dataclasses import dataclass

from fwk.config import ModelOptions
from fwk.errors import ConfigError
from fwk.features.declared import inputs_of, prompts_served
from fwk.interfaces.feature import PromptModel, PromptsServed
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.model import EncoderInput, ModelSpec
from fwk.plugins import PluginFactory
from fwk.plugins.selection import AUTO
from fwk.types import ModelConfig, Task


@dataclass(frozen=True, slots=True)
class ServedAs:
    """A task, what runs the model for it, and what is made of its prompts where it does not generate."""

    task: Task = "generate"
    runner: str = "generate"  # ``ModelSpec.runner_of`` the task
    is_decoder: bool = True  # what ``ModelSpec.load`` names is a ``Model``
    is_recurrent: bool = False  # ``ModelSpec.is_recurrent``
    prompts: PromptsServed | None = None  # of a model that does not generate
    encoder: EncoderInput | None = None  # an encoder reads the prompt, a decoder writes
    inputs: frozenset[str] = frozenset()  # kinds besides text that prompts may have

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a prompt's tokens must be computed together."""
        return self.encoder is not None or (self.prompts is not None and self.prompts.needs_whole_prompts)


def served_as(
    options: ModelOptions,
    spec: ModelSpec | None,
    config: ModelConfig,
    checkpoint: Checkpoint,
    made_for: str,
    factory: PluginFactory,
) -> ServedAs:
    """Decide it by ``--task``, or by what the checkpoint was made for.

    spec: None where no plugin serves the model, which is reported when plugins are chosen. made_for: the task that the
    checkpoint names. Raises ``ConfigError`` or ``ModelLoadError`` for what cannot be.
    """
    if spec is None:
        return ServedAs()
    tasks = spec.tasks_of(config.architecture) or (spec.task,)
    task = options.task
    if task == AUTO:
        task = made_for if made_for in tasks else tasks[0]
    runner = spec.runner_of(task)
    if runner == "generate":
        inputs = inputs_of(factory, spec)
        return ServedAs(task, runner, is_recurrent=spec.is_recurrent, encoder=spec.encoder_input(config), inputs=inputs)
    if spec.encoder_input(config) is not None:
        raise ConfigError(f"--task {task}: {options.model} has an encoder and a decoder, which generate together")
    made = prompts_served(factory, PromptModel(options.model, spec, config, task, checkpoint))
    return ServedAs(task, runner, spec.runner == "generate", spec.is_recurrent, made)
