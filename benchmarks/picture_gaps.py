"""Gaps between tokens of chats while requests with pictures arrive, with and without processes that encode.

    python -m benchmarks.picture_gaps --workers 0 --workers 1 --repeats 3

Servers of one random model of SmolVLM-256M's shape (float32, 512 x 512 pixels a picture) are measured in turns: gaps
of a few streams of text alone, then while 32 requests with 8 different pictures come at once. Needs the extra [vision].
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

VOCAB = 512
SPECIALS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}User:{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}Assistant:"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "dtype": "float32",
    "image_token_id": VOCAB - len(SPECIALS), "scale_factor": 4,
    "text_config": {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    "vision_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    },
}  # fmt: skip
PREPROCESSOR = {
    "do_image_splitting": False, "size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
NUM_PICTURES, NUM_REQUESTS = 8, 32


def write_model(folder: Path) -> None:
    """What the dummy loader needs."""
    from tokenizers import AddedToken

    from fwk_loaders.dummy.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(VOCAB - len(SPECIALS), str(folder))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def picture(seed: int) -> str:
    """A URL of one that no other seed makes."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((512, 512)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@contextmanager
def server(model: Path, flags: list[str]) -> Iterator[str]:
    """Its address, while it runs."""
    command = [sys.executable, "-m", "fwk", "serve", str(model), "--served-model-name", "m", "--port", "0", *flags]
    command += ["--load-format", "dummy", "--max-total-tokens", "16384"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            while True:
                log.seek(0)
                found = [line.split(" at ")[1].split()[0] for line in log if " serves " in line and " at http" in line]
                if found:
                    break
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read())
                time.sleep(0.2)
            yield found[0]
        finally:
            process.terminate()
            process.wait(60)


@dataclass
class Streams:
    """Texts that are generated until ``close``, and when each of their tokens came."""

    url: str
    count: int
    times: list[list[float]] = field(default_factory=list[list[float]])
    _ends: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def start(self) -> None:
        for number in range(self.count):
            self.times.append([])
            self._threads.append(threading.Thread(target=self._follow, args=(number,)))
            self._threads[-1].start()

    def _follow(self, number: int) -> None:
        given = {"model": "m", "prompt": f"Text {number}:", "max_tokens": 6000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=given, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.times[number].append(time.monotonic())
                if self._ends.is_set():
                    return

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between two tokens of a text, of those that came between two times."""
        return [b - a for own in self.times for a, b in itertools.pairwise(own) if b > start and a < end]

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def measured(model: Path, workers: int, num_streams: int, more: list[str]) -> dict[str, float]:
    """One server: gaps before and while pictures come, in ms, and the seconds that these took."""
    flags = ["--mm-encoder-workers", str(workers), *more] if workers else more
    with server(model, flags) as url:
        pictures = [picture(seed) for seed in range(NUM_PICTURES + 1)]

        def ask(number: int) -> None:
            content = [
                {"type": "image_url", "image_url": {"url": pictures[number]}},
                {"type": "text", "text": "What is this?"},
            ]
            given = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
            httpx.post(f"{url}/v1/chat/completions", json=given, timeout=600).raise_for_status()

        ask(NUM_PICTURES)  # starts what decodes
        streams = Streams(url, num_streams)
        streams.start()
        while not all(len(own) > 30 for own in streams.times):
            time.sleep(0.05)
        begin = time.monotonic()
        time.sleep(5)
        start = time.monotonic()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            list(pool.map(ask, [i % NUM_PICTURES for i in range(NUM_REQUESTS)]))
        end = time.monotonic()
        time.sleep(0.5)
        streams.close()
    alone, busy = streams.gaps(begin, start), streams.gaps(start, end)
    return {
        "alone": 1000 * statistics.median(alone),
        "median": 1000 * statistics.median(busy),
        "p99": 1000 * statistics.quantiles(busy, n=100)[98],
        "largest": 1000 * max(busy),
        "seconds": end - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, action="append", help="of --mm-encoder-workers; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("flags", nargs="*", help="after --: more flags of servers with workers")
    given = parser.parse_args()
    kinds = given.workers or [0, 1]
    found: dict[int, list[dict[str, float]]] = {workers: [] for workers in kinds}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for _ in range(given.repeats):
            for workers in kinds:
                found[workers].append(measured(Path(folder), workers, given.streams, given.flags if workers else []))
                print(workers, {name: round(x, 1) for name, x in found[workers][-1].items()}, flush=True)
    print(f"| workers | {' | '.join(found[kinds[0]][0])} |")
    for workers, runs in found.items():
        cells = [
            f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            for values in ([run[name] for run in runs] for name in runs[0])
        ]
        print(f"| {workers} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
