"""Images of clients, decoded within bounds."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageOps

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "MPO")
"""Those that are tried. MPO is JPEG with several pictures, as telephones write it: of several the first is seen."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)
"""What Pillow raises for damaged files."""


def check_places(count: int, items: Sequence[MediaItem]) -> None:
    """Raise ``InvalidRequest`` unless a prompt has a place for each image. count: of its places."""
    if count != len(items):
        raise InvalidRequest(
            f"the prompt has places for {count} images, and there are {len(items)}: the chat template must show "
            "each of them once",
            "messages",
        )


def decode(item: MediaItem, max_pixels: int) -> Image.Image:
    """The image in RGB, turned as its EXIF data say, on white where it is transparent.

    Raises ``InvalidRequest`` naming the item and what to do about it.
    """
    with _bounded(max_pixels):
        return _decoded(item, _opened(item, max_pixels), max_pixels)


@contextmanager
def _bounded(max_pixels: int) -> Iterator[None]:
    """Pillow's own bound, which is global, and holds of each frame, too. It warns first, where we refuse."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of damaged metadata, too
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _decoded(item: MediaItem, image: Image.Image, max_pixels: int) -> Image.Image:
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I"):  # 16 bits of grey, of which a conversion keeps what is below 256
            turned = Image.fromarray((np.asarray(turned).clip(0, 65_535) // 257).astype(np.uint8))
        if "A" in turned.getbands() or turned.info.get("transparency") is not None:
            turned = turned.convert("RGBA")
            turned = Image.alpha_composite(Image.new("RGBA", turned.size, (255, 255, 255, 255)), turned)
        return turned.convert("RGB")
    except Image.DecompressionBombError:
        raise _too_large(item, image, max_pixels) from None
    except _BROKEN:
        raise InvalidRequest(
            f"{item.name}: the {image.format} image is damaged or cut short; send the whole file", item.name
        ) from None


def _opened(item: MediaItem, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(item.data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_large(item, None, max_pixels) from None
    except _BROKEN:
        raise InvalidRequest(
            f"{item.name} is no PNG, JPEG, WebP or GIF image, or its beginning is damaged: convert it", item.name
        ) from None
    if image.width * image.height > max_pixels:
        raise _too_large(item, image, max_pixels)
    return image


def _too_large(item: MediaItem, image: Image.Image | None, max_pixels: int) -> InvalidRequest:
    size = f"of {image.width} x {image.height} pixels " if image is not None else ""
    return InvalidRequest(
        f"{item.name}: the image {size}has more than the {max_pixels} that this server decodes "
        "(--max-image-pixels): scale it down",
        item.name,
    )
