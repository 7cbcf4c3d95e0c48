"""Images for Idefics3 against transformers' own processor, number for number, and what is no image."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.helpers.images import TOKENS_PER_TILE, encoded, noise, reference_processor, write_vision
from tests.helpers.lazy import lazy

from fwk.config import ModelOptions
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk.interfaces.multimodal import MediaItem, MultimodalContext
from fwk.text import ModelText
from fwk.types import ModelConfig
from fwk_loaders.dummy.loader import DummyLoader
from fwk_models.idefics3 import models
from fwk_multimodal._common.images import decode
from fwk_multimodal.idefics3.processor import Idefics3Processor

image_transforms = lazy("transformers.image_transforms")
image_utils = lazy("transformers.image_utils")

TEXT = "a<image>b\n<image>\n"
SIZES = [(40, 24), (24, 40), (16, 16), (33, 32), (200, 3), (3, 200), (1, 1), (100, 99), (17, 64), (640, 480)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_vision(folder)
    return folder


@cache
def context(folder: Path, **changes: Any) -> MultimodalContext:
    checkpoint = DummyLoader(LoaderContext()).open(folder)
    config = ModelConfig.from_dict(models()[0].normalised(checkpoint.config()), str(folder))
    text = ModelText(checkpoint, ModelOptions(), config.vocab_size)
    return MultimodalContext(config, {**checkpoint.processor_config(), **changes}, text, max_pixels=2**20)


@pytest.mark.parametrize(
    "changes",
    [{}, {"do_image_splitting": False}, {"resample": 2, "rescale_factor": 0.01}],
    ids=["split", "whole", "other"],
)
def test_tokens_and_numbers_are_those_of_transformers(folder: Path, changes: dict[str, Any]) -> None:
    ours = Idefics3Processor(MultimodalContext(*_parts(folder, changes)))
    theirs = reference_processor(folder, **changes)
    for i, (size, other) in enumerate(zip(SIZES, reversed(SIZES), strict=True)):
        images = [noise(i, *size), noise(100 + i, *other)]
        wanted = theirs(text=TEXT, images=images, return_tensors="np", add_special_tokens=False)
        items = [MediaItem("image", encoded(image)) for image in images]
        prompt = ours.context.text.encode(TEXT, add_special_tokens=False)
        placed = ours.process(prompt, items)
        assert prompt == ours.context.text.encode(TEXT, add_special_tokens=False)
        assert placed.token_ids == wanted["input_ids"][0].tolist()
        found = np.stack([piece.arrays["pixel_values"] for piece in placed.media])
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted["pixel_values"][0])
        image_id = ours.context.config.raw["image_token_id"]
        marked = [n for piece in placed.media for n in range(piece.start, piece.start + piece.length)]
        assert marked == [n for n, token in enumerate(placed.token_ids) if token == image_id]
        assert {piece.length for piece in placed.media} == {TOKENS_PER_TILE}
        assert [piece.item for piece in placed.media] == sorted(piece.item for piece in placed.media)


def _parts(folder: Path, changes: dict[str, Any]) -> tuple[Any, ...]:
    found = context(folder)
    return found.config, {**found.processor_config, **changes}, found.text, found.max_pixels


def test_decoding_is_that_of_transformers() -> None:
    """On white where it is transparent, turned as EXIF says, whatever the format."""
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter to the right
    palette = noise(5).quantize(16)
    files = [
        encoded(noise(1)),
        encoded(noise(2), "JPEG", exif=exif.tobytes()),
        encoded(noise(3), "WEBP", lossless=True),
        encoded(palette, "GIF"),
        encoded(noise(6, mode="L")),
    ]
    for data in files:
        wanted = np.asarray(image_utils.load_image(Image.open(io.BytesIO(data))))
        np.testing.assert_array_equal(np.asarray(decode(MediaItem("image", data), 2**20)), wanted)
    clear = noise(4, mode="RGBA")
    wanted = image_transforms.convert_to_rgb(clear, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(decode(MediaItem("image", encoded(clear)), 2**20)), wanted)


def test_of_an_animation_the_first_picture_is_seen() -> None:
    more = {"save_all": True, "append_images": [noise(2)]}
    for kind, settings in (("GIF", more), ("PNG", more), ("WEBP", {**more, "lossless": True})):
        found = decode(MediaItem("image", encoded(noise(1), kind, **settings)), 2**20)
        wanted = decode(
            MediaItem("image", encoded(noise(1), kind, **({"lossless": True} if kind == "WEBP" else {}))), 2**20
        )
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_sixteen_bits_of_grey_keep_their_scale() -> None:
    wide = np.array([[0, 255, 256, 257], [514, 1000, 65_278, 65_535]], np.uint16)
    found = np.asarray(decode(MediaItem("image", encoded(Image.fromarray(wide))), 2**20))
    assert found[..., 0].tolist() == [[0, 0, 0, 1], [2, 3, 254, 255]]
    assert (found == found[..., :1]).all()


def huge_png(width: int, height: int) -> bytes:
    """A head that promises so many pixels, and next to nothing behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "messages.0. is no PNG, JPEG, WebP or GIF image"),
    "text": (lambda: b"GET / HTTP/1.1", "is no PNG, JPEG, WebP or GIF image"),
    "another format": (lambda: encoded(noise(1), "TIFF"), "is no PNG, JPEG, WebP or GIF image"),
    "half a PNG": (lambda: encoded(noise(1))[:1000], "the PNG image is damaged or cut short; send the whole file"),
    "half a JPEG": (lambda: encoded(noise(1), "JPEG")[:700], "the JPEG image is damaged or cut short"),
    "half a WebP": (lambda: encoded(noise(1), "WEBP")[:300], "damaged"),
    "too large": (lambda: huge_png(1100, 1000), "of 1100 x 1000 pixels has more than the 1048576 .* scale it down"),
    "a bomb": (lambda: huge_png(60_000, 60_000), "has more than the 1048576 that this server decodes"),
    "fewer rows than said": (lambda: huge_png(500, 500), "the PNG image is damaged or cut short"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_image_is_refused(folder: Path, make: Callable[[], bytes], message: str) -> None:
    processor = Idefics3Processor(context(folder))
    prompt = processor.context.text.encode("<image>", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match=message) as caught:
        processor.process(prompt, [MediaItem("image", make(), "messages[0]")])
    assert caught.value.param == "messages[0]"


def test_every_cut_of_a_file_is_refused_or_an_image(folder: Path) -> None:
    """No other error comes out of the decoders, wherever a file ends and whatever byte is wrong."""
    random = np.random.default_rng(0)
    params, modes = set[str | None](), set[str]()
    for format_ in ("PNG", "JPEG", "WEBP", "GIF"):
        data = encoded(noise(1, 20, 12), format_)
        for _ in range(60):
            broken = bytearray(data[: random.integers(1, len(data) + 1)])
            for place in random.integers(0, len(broken), 3):
                broken[place] = random.integers(256)
            try:
                image = decode(MediaItem("image", bytes(broken), "it"), 2**20)
            except InvalidRequest as error:
                params.add(error.param)
            else:
                modes.add(image.mode)
    assert (params, modes) == ({"it"}, {"RGB"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "with do_resize true only"),
        ({"size": {"height": 3}}, "KeyError: 'longest_edge'"),
        ({"max_image_size": {"longest_edge": 0}}, "an edge must be 1 to 4096 pixels, not 0"),
        ({"max_image_size": {"longest_edge": 3}}, "'max_image_size' is less than one patch"),
        ({"image_mean": [1, 2]}, "cannot reshape array"),
        ({"resample": 17}, "17 is not a valid Resampling"),
    ],
)
def test_wrong_settings_are_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Idefics3Processor(MultimodalContext(*_parts(folder, changes)))
