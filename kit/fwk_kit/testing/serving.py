"""Engines on a tiny random model: what a plugin is served with."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fwk.interfaces.model import ModelSpec
from fwk.types import ModelConfig, SamplingParams
from fwk_kit.testing.installed import alongside, installed

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": None,
    "dtype": "float32",
}
"""config.json of the tiny model: it has no token that ends an answer."""

MIXTURE: dict[str, Any] = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""config.json of a tiny mixture of experts."""

PROMPTS = [[1, 7, 3, 9] * 9, [5], list(range(40, 75)), [1, 7, 3, 9] * 9 + [8, 8]]
"""A repeated one, one of a single token, and two with a common beginning."""

NUM_TOKENS = 12


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """A config.json as the model plugin that would serve it reads it (``ModelSpec.normalised``)."""
    names: Any = config.get("architectures") or [""]
    candidates = (item.declaration for item in installed().family("models"))
    spec = next((one for one in candidates if isinstance(one, ModelSpec) and names[0] in one.architectures), None)
    return ModelConfig.from_dict(config if spec is None else spec.normalised(config), "fwk_kit.testing")


def tiny_tensors() -> dict[str, np.ndarray]:
    """Random float32 weights of ``TINY``, by their Hugging Face names: for a checkpoint that is served."""
    random = np.random.default_rng(0)
    hidden, inner, vocab = (int(TINY[name]) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden * int(TINY["num_key_value_heads"]) // int(TINY["num_attention_heads"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    shapes["model.norm"] = (hidden,)
    for layer in range(int(TINY["num_hidden_layers"])):
        outputs = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
        own = {f"self_attn.{name}": (size, hidden) for name, size in outputs.items()}
        own |= {f"mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
        own |= {"mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0.0, 0.02, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def tokens_of(config: dict[str, Any], package: str | None = "fwk", **options: Any) -> list[list[int]]:
    """The greedy continuations of ``PROMPTS`` by a model of ``config`` with random weights.

    Only the plugins of fwk and of ``package`` are there; None: all that are installed, as other processes find them.
    """
    from fwk import LLM  # noqa: PLC0415 - imports torch

    settings = {"load_format": "dummy", "max_total_tokens": 2048, "max_running_requests": 8, "check_blocks": True}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with LLM(
            folder, plugins=installed() if package is None else alongside(package), **{**settings, **options}
        ) as llm:
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            together = [done.token_ids for done in llm.generate(PROMPTS, sampling)]
            again = [llm.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS]
    assert again == together, "alone, the prompts get other tokens than together"
    assert all(len(tokens) == NUM_TOKENS for tokens in together)
    return together


@functools.cache
def plain_tokens(config: str, options: str = "{}") -> list[list[int]]:
    """Those of the built-in plugins, for a config.json and options as JSON; computed once for the test run."""
    return tokens_of(json.loads(config), **json.loads(options))


@contextlib.contextmanager
def serve_tiny(*arguments: str, config: Mapping[str, Any] | None = None, model: str | None = None) -> Iterator[str]:
    """A real server (``fwk serve``) on a free port, with a tiny random model: its address.

    arguments: further words of the command line. config: of that model, instead of ``TINY``. model: another one, as
    ``fwk serve`` takes it. Raises ``RuntimeError`` with the server's last words when it does not come up.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config or TINY))
        named = [folder, "--load-format", "dummy"] if model is None else [model]
        words = ["-m", "fwk", "serve", *named, "--port", "0", "--max-total-tokens", "2048"]
        command = [sys.executable, *words, *arguments]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            assert process.stderr is not None
            lines: list[str] = []
            try:
                for line in process.stderr:
                    lines.append(line)
                    found = re.search(r" serves .* at (http://\S+)", line)
                    if found:
                        threading.Thread(target=process.stderr.read, daemon=True).start()
                        yield found.group(1)
                        return
                raise RuntimeError(f"the server did not come up: {''.join(lines)[-2000:]}")
            finally:
                process.terminate()
                process.wait(30)


def metric(url: str, name: str) -> float:
    """What ``/metrics`` says of a name (``fwk:num_draft_tokens_total``), all its labels together; 0 where it is not."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{re.escape(name)}[ {{]", line))


def ask(url: str, path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    """The JSON that a server answers; with a body, to a POST. Raises ``urllib.error.HTTPError``."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
