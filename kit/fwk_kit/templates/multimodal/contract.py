"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from fwk.interfaces.multimodal import MediaItem
from fwk.testing import TINY, MultimodalProcessorSuite, ask

PICTURES = (b"P5 2 2 255\n\x00\x01\x02\x03", b"P5 1 3 255\n\x00\x01\xff")
MARK = 9  # a tab, in the bytes that are the tiny model's tokens
TEMPLATE = """\
{%- for message in messages %}
{%- for part in message.content %}{{ part.text if part.type == "text" else "\\t" }}{% endfor %}
{%- endfor %}"""


def asking(picture: bytes) -> dict[str, Any]:
    """What a client sends with a picture."""
    url = "data:image/x-portable-graymap;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


class TestMine(MultimodalProcessorSuite):
    plugin = "mine"
    samples = tuple(MediaItem("image", picture) for picture in PICTURES)
    prompt = (1, MARK, 5)
    config = {**TINY, "architectures": ["MineForCausalLM"]}
    processor_config = {"image_token_id": MARK}
    serve_with = {"load_format": "dummy"}
    served_path = "/v1/chat/completions"
    served_request = asking(PICTURES[0])

    def served_model(self, folder: Path) -> str:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(self.config))
        (model / "preprocessor_config.json").write_text(json.dumps(self.processor_config))
        (model / "chat_template.jinja").write_text(TEMPLATE)
        return str(model)

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        other = ask(url, self.served_path, asking(PICTURES[1]))
        assert reply["usage"]["prompt_tokens"] == len("Hi") + 4, "a token for each point"
        assert other["usage"]["prompt_tokens"] == len("Hi") + 3
