"""The part in each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fwk.interfaces.feature import ModelBuild, WorkerPart, WorkerPartContext
from fwk.interfaces.grammar import Grammar, GrammarRequest
from fwk.interfaces.grammar_masks import GrammarProcessor, Mask
from fwk.interfaces.model import ModelContext
from fwk.interfaces.sampling import SamplingContext
from fwk.interfaces.step import SequenceRecords
from fwk_grammar.grammar_masks.compiler import GrammarCompiler
from fwk_grammar.grammar_masks.masks import CompiledGrammars, GrammarMasks


class GrammarPart(WorkerPart):
    """Masks where tokens are chosen: it has a part in no step besides."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._store = CompiledGrammars(self._compile)
        self._compiler: GrammarCompiler | None = None
        self._is_begun = False

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What the engine's part calls."""
        return {"prepare": self._store.prepare, "ready": self._store.ready, "release": self._store.release}

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        """Find out about a broken backend before any weight is read."""
        backend = self.context.chosen.get("grammar")
        if backend is not None and build.role == "served":
            assert self.context.plugins is not None
            self.context.plugins.load(self.context.plugins.find("grammar", backend.name))
        return ""

    def masks(self, context: SamplingContext, table: SequenceRecords, mask: Mask) -> GrammarProcessor | None:
        backend, plugins, text = self.context.chosen.get("grammar"), self.context.plugins, context.text
        if backend is None or plugins is None or text is None:
            return None
        self._compiler = GrammarCompiler(plugins, text, context.vocab_size, context.eos_token_ids)
        self._compiler.use(backend.name)
        return GrammarMasks(context, self._store, table, mask)

    def warmed_up(self) -> None:
        """Begin to build the backend, for which no step waits."""
        if self._compiler is not None and not self._is_begun:
            self._is_begun = True
            self._store.begin(self._compiler.build)

    def _compile(self, request: GrammarRequest) -> Grammar:
        assert self._compiler is not None, "operations come once the worker serves"
        return self._compiler.compile(request)

    def close(self) -> None:
        self._store.close()
