"""EAGLE (arXiv:2401.15077) with the trees of EAGLE-2 (arXiv:2406.16858), and EAGLE-3 (arXiv:2503.01840)."""

from __future__ import annotations

from fwk.errors import ConfigError
from fwk.interfaces.speculative import SpeculativeContext
from fwk_speculative._common.heads import DraftHead, HeadDecoder
from fwk_speculative.eagle import EagleOptions
from fwk_speculative.eagle.head import Eagle3Head, EagleHead


class EagleDecoder(HeadDecoder):
    """Features are the target's last hidden states, normalised."""

    def __init__(self, context: SpeculativeContext) -> None:
        options = context.options or EagleOptions()
        super().__init__(context, options, self._make_head(context, _path(options, "eagle")))

    def _make_head(self, context: SpeculativeContext, path: str) -> DraftHead:
        target, build = context.target, context.build
        assert target is not None
        assert build is not None
        return build(lambda layers: EagleHead(layers, target), path)


class Eagle3Decoder(HeadDecoder):
    """Features are the residual streams before three layers, joined and projected."""

    def __init__(self, context: SpeculativeContext) -> None:
        options = context.options or EagleOptions()
        super().__init__(context, options, self._make_head(context, _path(options, "eagle3")))

    def _make_head(self, context: SpeculativeContext, path: str) -> DraftHead:
        target, build, tap = context.target, context.build, context.tap
        assert target is not None
        assert build is not None
        assert tap is not None
        head = build(lambda layers: Eagle3Head(layers, target), path)
        tap(head.layers_read(context.num_target_layers))
        return head


def _path(options: EagleOptions, name: str) -> str:
    path = options.draft_model()
    if not path:
        raise ConfigError(f"--speculative-algorithm {name} needs a head: give --speculative-draft-model-path")
    return path
