"""Decoders that read images through an encoder of patches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from fwk.interfaces.model import ModelContext
from fwk_layers import RotaryEmbedding, RotaryRows
from fwk_models._common.decoder import Decoder
from fwk_models._common.patches import Eyes, PatchEncoder
from fwk_models._common.planes import PlaneRotary, plane_rotary

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class SeesPatches:
    """To be put before a model's class: positions of three planes, and ``encode`` of images as patches.

    sections: pairs of numbers that each plane turns, where the config does not say. merger: see ``PatchEncoder``.
    """

    sections: ClassVar[tuple[int, int, int]]
    is_striped: ClassVar[bool] = False
    merger: ClassVar[tuple[str, str, str]]
    rotary: RotaryEmbedding
    images: PatchEncoder | None = None

    def open_eyes(self, context: ModelContext, root: str) -> None:
        """Build the encoder whose names begin with ``root``, or leave it out where this model encodes none."""
        if context.encodes("image"):
            self.images = PatchEncoder(context, root, self.eyes(context), self.merger)
            return
        for name in context.weights.names():
            if name.startswith(f"{root}."):
                context.weights.skip(name)

    @abstractmethod
    def eyes(self, context: ModelContext) -> Eyes:
        """What the config says of the encoder."""

    def make_rotary(self, context: ModelContext) -> RotaryEmbedding:
        """In a run of text alone all planes are one."""
        if "image" not in context.media:
            return RotaryEmbedding(context)
        return plane_rotary(context, self.sections, is_striped=self.is_striped)

    def angles(self, batch: ForwardBatch) -> RotaryRows:
        """Those of the batch's tokens, for all layers."""
        rotary = self.rotary
        return rotary.angles(batch) if isinstance(rotary, PlaneRotary) else rotary.rows(batch.positions)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [num_patches, numbers of a patch] and ``grid``, its rows and columns of patches.

        Of a video, as many frames as a patch has are one: planes of an encoder see none of the others.

        One after another: they are of different sizes, and the numbers of one depend on no other.
        """
        assert kind in ("image", "video")
        assert self.images is not None, "the run takes no images"
        return [self.images(item["pixel_values"], *item["grid"].tolist()) for item in items]


class SeeingDecoder(SeesPatches, Decoder):
    """A decoder that does, under the names of either generation of checkpoints."""

    def __init__(self, context: ModelContext) -> None:
        has_old_names = context.weights.has("model.embed_tokens.weight")
        self.root = "model" if has_old_names else "model.language_model"
        super().__init__(context)
        self.open_eyes(context, "visual" if has_old_names else "model.visual")
