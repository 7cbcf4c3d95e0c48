"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.interfaces.multimodal import MediaItem
from fwk.testing import MultimodalProcessorSuite


class TestMine(MultimodalProcessorSuite):
    plugin = "mine"
    samples = (MediaItem("image", b"P5 2 2 255\n\x00\x01\x02\x03"), MediaItem("image", b"P5 1 3 255\n\x00\x01\xff"))
    prompt = (1, 9, 5)
    processor_config = {"image_token_id": 9}
