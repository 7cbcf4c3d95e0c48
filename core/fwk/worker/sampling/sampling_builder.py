"""Build what a worker chooses tokens with: the logits processors, masks of grammars first, and the sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fwk.config import Config
from fwk.errors import ConfigError, in_range, shaped
from fwk.features.worker import WorkerFeatures
from fwk.interfaces.device import Upload
from fwk.interfaces.grammar import Grammar
from fwk.interfaces.grammar_masks import GrammarProcessor
from fwk.interfaces.native import NativeThreads
from fwk.interfaces.sampling import LogitsProcessor, Sampler, SamplerSpec, SamplingContext
from fwk.plugins.answers import checked
from fwk.setup.resolve import ModelSetup
from fwk.text import ModelText, model_text
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import Place, SamplingPipeline
from fwk.worker.sampling.processors import WorkerProcessors


class SamplingBuilder:
    """Builds the ``SamplingPipeline`` of one worker.

    chosen: names of what was chosen, by family. upload: brings an array to the device.

    - ``processors``: once the pipeline is built.
    """

    processors: WorkerProcessors | None = None
    _masks: GrammarProcessor | None = None

    def __init__(
        self,
        config: Config,
        setup: ModelSetup,
        device: torch.device,
        threads: NativeThreads,
        upload: Upload,
        chosen: dict[str, str],
    ) -> None:
        self._config = config
        self._setup = setup
        self._device = device
        self._threads = threads
        self._upload = upload
        self._chosen = chosen
        chosen.setdefault("grammar", "none")

    def settle_grammars(self, features: WorkerFeatures) -> None:
        """Do without a grammar backend where no feature masks by it. Raises ``ConfigError`` where one was named."""
        name = self._chosen["grammar"]
        if name != "none" and not features.keeps_grammars:
            if self._config.engine.grammar_backend == name:
                raise ConfigError(
                    f"--grammar-backend {name}: no feature that is installed and on masks by grammars; fwk's is "
                    "features.grammar_masks (fwk plugins list)"
                )
            self._chosen["grammar"] = "none"

    def grammar(self, slot: int) -> Grammar | None:
        """That of the sequence in a slot; None without one."""
        return None if self._masks is None else self._masks.grammar(slot)

    @functools.cached_property
    def encode(self) -> Callable[[str], list[int]]:
        """Text to token ids, without special tokens; the tokenizer is opened with the first."""
        text = functools.cache(self._text)
        return lambda string: text().encode(string, add_special_tokens=False)

    def _text(self) -> ModelText:
        return model_text(self._setup.opened.checkpoint, self._config.model, self._setup.opened.config.vocab_size)

    def build(self, table: SequenceTable, features: WorkerFeatures) -> SamplingPipeline:
        """From logits to tokens of the sequences in a table."""
        opened, factory = self._setup.opened, self._setup.factory
        vocab_size, text = opened.config.vocab_size, functools.cache(self._text)

        @functools.cache
        def token_bytes() -> list[bytes]:
            return text().all_bytes(vocab_size)

        context = partial(
            SamplingContext,
            vocab_size=vocab_size,
            num_slots=self._config.engine.max_running_requests,
            device=self._device,
            eos_token_ids=opened.eos_token_ids,
            threads=self._threads,
            token_bytes=token_bytes,
            upload=self._upload,
            text=text,
        )
        sampler: Sampler = factory.build("samplers", context)
        checked(factory.item("samplers"), sampler, sample=_picked)
        processors: dict[Place, LogitsProcessor] = {}
        if self._chosen["grammar"] != "none":
            self._masks = features.masks(context(), table, sampler.mask)
        if self._masks is not None:
            processors[Place(-1, "")] = self._masks
        own = WorkerProcessors(factory, context)
        processors |= own.build_all()
        declaration = factory.item("samplers").declaration
        assert isinstance(declaration, SamplerSpec)
        late = declaration.late_positions
        pipeline = SamplingPipeline(processors, sampler, table, declaration.finishes, late_positions=late)
        own.pipeline = pipeline
        self.processors = own
        return pipeline


def _picked(answer: Any, logits: Tensor, rows: Any) -> str | None:
    return shaped(answer, (logits.shape[0],), torch.int64) or in_range(answer, logits.shape[1], "the token", -1)
