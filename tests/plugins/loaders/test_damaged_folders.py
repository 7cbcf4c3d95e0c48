"""Check 35 for folders: bytes changed in weights, tokeniser and configuration. A checkpoint, or a sentence; soon."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.rig import TINY

from fwk_loaders.dummy.tokenizer import build_tokenizer

pytestmark = pytest.mark.sweep

COUNTS = {"model.safetensors": 250, "tokenizer.json": 250, "config.json": 250}
FILES = (*COUNTS, "tokenizer_config.json", "generation_config.json")

OPEN_ALL = """
import json, resource, signal, sys
from pathlib import Path
from fwk.errors import FwkError
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.text import ModelText
from fwk.setup.checkpoint import open_model
import tokenizers, torch

torch.set_num_threads(1)

plugins = discover()
size = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 500 * 2**20, resource.RLIM_INFINITY))
counts, nameless = {"loaded": 0, "refused": 0}, []
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(folder.name, file=sys.stderr, flush=True)
    signal.alarm(5)  # not handled: it ends the process
    try:
        config = build_config(plugins, {"model": str(folder), "load_format": "safetensors"})
        opened = open_model(config, plugins, lambda line: None)
        ModelText(opened.checkpoint, config.model, opened.config.vocab_size)
        weights = opened.checkpoint.weights()
        for name in weights.names():
            weights.raw(name)
        counts["loaded"] += 1
    except FwkError as error:
        counts["refused"] += 1
        if not any(word in str(error) for word in (folder.name, ".json", ".safetensors", "model")):
            nameless.append(str(error))
        if len(str(error)) > 2000 or "Traceback" in str(error):
            nameless.append(str(error)[:200])
    signal.alarm(0)
print(json.dumps([counts, nameless]))
"""


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """The files of a checkpoint that can be opened."""
    folder = tmp_path / "whole"
    folder.mkdir()
    dice = torch.Generator().manual_seed(1)
    save_file(
        {f"model.layers.{i}.mlp.up_proj.weight": torch.rand(128, 64, generator=dice) for i in range(3)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(TINY, indent=1))
    (folder / "tokenizer.json").write_text(build_tokenizer(512, "x").to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ x }}"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(data: bytes, dice: random.Random) -> bytes:
    """Flipped, overwritten, cut or repeated bytes; most of them near the front, where headers are."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        where = dice.randrange(min(len(changed), 600) if dice.random() < 0.8 else len(changed))
        changed[where] = dice.choice([changed[where] ^ (1 << dice.randrange(8)), dice.randrange(256), 0xFF, ord("9")])
    if dice.random() < 0.1:
        del changed[dice.randrange(len(changed)) :]
    if dice.random() < 0.05:
        where = dice.randrange(len(changed) + 1)
        changed[where:where] = b"9" * 40
    return bytes(changed)


def test_random_damage(tmp_path: Path, whole: dict[str, bytes]) -> None:
    dice = random.Random(35)
    root = tmp_path / "damaged"
    for name, count in COUNTS.items():
        for number in range(count):
            folder = root / f"{name}-{number:03}"
            folder.mkdir(parents=True)
            for other, data in whole.items():
                (folder / other).write_bytes(damage(data, dice) if other == name else data)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, str(root)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts, nameless = json.loads(done.stdout.splitlines()[-1])
    assert nameless == []
    assert counts["loaded"] + counts["refused"] == sum(COUNTS.values())
    assert min(counts.values()) > 50


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff" * 100, b"{" * 100_000, b'{"a": 1e999}', b"7" * 5000])
def test_no_such_file_is_believed(tmp_path: Path, whole: dict[str, bytes], name: str, content: bytes) -> None:
    """A file of another kind altogether, in place of each: told by its name."""
    from fwk.errors import FwkError
    from fwk.plugins import discover
    from fwk.plugins.options import build_config
    from fwk.setup.checkpoint import open_model
    from fwk.text import ModelText

    folder = tmp_path / "other"
    folder.mkdir()
    for other, data in whole.items():
        (folder / other).write_bytes(content if other == name else data)
    plugins = discover()
    config = build_config(plugins, {"model": str(folder), "load_format": "safetensors"})
    try:
        opened = open_model(config, plugins, lambda line: None)
        opened.checkpoint.generation_config()
        opened.checkpoint.tokenizer_config()
        ModelText(opened.checkpoint, config.model, opened.config.vocab_size)
        opened.checkpoint.weights()
        told = ""
    except FwkError as error:
        told = str(error)
    if content == b'{"a": 1e999}' and name.endswith("config.json"):
        assert not told or "is missing" in told  # JSON it is; what it lacks is said of the folder
    else:
        assert name in told
