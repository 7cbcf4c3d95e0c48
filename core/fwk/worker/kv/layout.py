"""Which layers of a worker share a block table, and what another process must know of their blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from fwk.config import Config
from fwk.features.declared import moved_by
from fwk.interfaces.attention import AttentionBackendSpec, AttentionLayer
from fwk.interfaces.feature import WorkerCache
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.prefix_cache import PrefixCacheSpec
from fwk.setup.resolve import ModelSetup
from fwk.worker.kv import kv_cache
from fwk.worker.kv.identity import kv_common, kv_identity
from fwk.worker.loading.model_builder import ModelBuilder
from fwk_files.model_hash import ModelHash


@dataclass(eq=False, slots=True)
class KVLayout:
    """The layers with K/V of the models that a worker builds.

    chosen: names of what was chosen, by family. reasons: collects a sentence for each fallback.

    - ``files``: the hash of the model's files, begun at once where K/V leave the engine or come from elsewhere.
    """

    config: Config
    setup: ModelSetup
    group: ParallelGroup
    models: ModelBuilder
    chosen: dict[str, str]
    reasons: list[str]
    files: ModelHash = field(init=False)
    _moved: str = field(init=False)

    def __post_init__(self) -> None:
        self._moved = moved_by(self.setup.factory)
        self.files = ModelHash(self.setup.opened.path)
        if self._moved:
            self.files.start()

    def groups(self, num_own_layers: int) -> list[list[AttentionLayer]]:
        """The layers by block table. Whatever else moves blocks about knows one table only, and then there is one.

        num_own_layers: the served model's; those after them draft.
        """
        layers, factory = self.models.layers, self.setup.factory
        spec = factory.item("attention").declaration
        cache = factory.item("cache").declaration
        assert isinstance(spec, AttentionBackendSpec)
        assert isinstance(cache, PrefixCacheSpec)
        why = {
            "--disable-hybrid-swa-memory": self.config.engine.disable_hybrid_swa_memory,
            f"attention {self.chosen.get('attention')}": "kv_groups" not in spec.features,
            f"cache {self.chosen.get('cache')} keeps blocks in tiers": cache.tiers is not None,
            self._moved: bool(self._moved),
            "the model has recurrent layers": self.setup.opened.served.is_recurrent,
            "prompts are computed whole": self.setup.opened.served.needs_whole_prompts,
            "stages have layers of different kinds": self.group.stage.count > 1,
        }
        windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
        if not windows or min(windows) >= self.setup.max_model_len:  # no window is ever left behind
            return [layers]
        refusal = next((reason for reason, holds in why.items() if holds), "")
        if refusal:
            self.reasons.append(f"every layer keeps all of a sequence, though some see a window only: {refusal}")
            return [layers]
        return kv_cache.form_groups(self.models.attention, layers[:num_own_layers], layers[num_own_layers:])

    def cache(self, num_blocks: int) -> WorkerCache:
        """The KV cache, which is allocated, as features' parts may use it."""
        config, plugins, layers = self.config, self.setup.factory.plugins, self.models.layers

        def in_common() -> dict[str, str]:
            files = self.files.result()
            return kv_common(config, plugins, self.setup, self.chosen, layers, self.group, files)

        def identity(outlives: bool) -> bytes:
            files = self.files.result() if outlives else ""
            return kv_identity(config, plugins, self.setup, self.chosen, layers, self.group, files)

        own = [layer for layer in layers if layer.kv_cache is not None]
        return WorkerCache(own, num_blocks, config.engine.page_size, in_common, identity)
