"""``fwk plugins bench NAME --against REFERENCE``: the same requests through two plugins, parity and speed."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk import __version__
from fwk.errors import ConfigError
from fwk.plugins import FAMILIES, PluginSet, Registered, find

if TYPE_CHECKING:
    from fwk_offline.llm import LLM

FAMILIES_IN_A_STEP = (
    "attention", "quant", "models", "schedulers", "speculative", "lora", "cache", "samplers", "executors", "moe",
    "operators",
)  # fmt: skip

NEEDS: dict[str, dict[str, Any]] = {"lora": {"enable_lora": True}}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "float32",
}  # fmt: skip
"""The random model that is served unless ``--model`` names one."""

EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 128}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: so many prompts of so many tokens, continued by so many, so many times."""

    num_prompts: int = 8
    prompt_len: int = 128
    num_tokens: int = 32
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Side:
    """One plugin's figures: medians over the rounds, and all of them."""

    name: str
    tokens_per_second: float
    single_seconds: float
    rounds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Parity and speed of ``plugin``, as ratios to ``reference`` in the same process, rounds taken in turns."""

    family: str
    plugin: Side
    reference: Side
    equal_tokens: float
    max_logprob_error: float
    speed_ratio: float
    latency_ratio: float
    model: str
    load: Load
    fwk: str
    fingerprint: str
    machine: str


def run(plugins: PluginSet, item: Registered, against: str, model: str | None, load: Load) -> Report:
    """Build two engines and use them in turns. Raises ``ConfigError`` for a family that has no part in a step."""
    if item.family not in FAMILIES_IN_A_STEP:
        raise ConfigError(
            f"no benchmark for {item.key}: a {FAMILIES[item.family].noun} has no part in an engine's steps; "
            f"'fwk plugins test {item.name}' says whether it is right"
        )
    find(plugins, item.family, against)
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, **(EXPERTS if item.family == "moe" else {})}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        given = {"model": model} if model else {"model": folder, "load_format": "dummy"}
        engines = {name: _engine(plugins, item.family, name, given) for name in (item.name, against)}
        try:
            return _measured(plugins, item, against, model, load, engines)
        finally:
            for engine in engines.values():
                engine.close()


def _engine(plugins: PluginSet, family: str, name: str, given: dict[str, Any]) -> LLM:
    from fwk import LLM  # noqa: PLC0415 - imports torch

    option = FAMILIES[family].option
    assert option is not None
    room = {"max_total_tokens": 32768, "prefix_cache": "none"} if family != "cache" else {"max_total_tokens": 32768}
    return LLM(plugins=plugins, **{**given, **room, **NEEDS.get(family, {}), option: name})


def _measured(
    plugins: PluginSet, item: Registered, against: str, model: str | None, load: Load, engines: dict[str, LLM]
) -> Report:
    from fwk.types import SamplingParams  # noqa: PLC0415

    vocab = engines[item.name].engine.info.vocab_size
    prompts = [
        [(7 * i + 13 * j + j * j) % (vocab - 1) for j in range(load.prompt_len)] for i in range(load.num_prompts)
    ]
    greedy = SamplingParams(max_tokens=load.num_tokens, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = {name: [done.token_ids for done in llm.generate(prompts, greedy)] for name, llm in engines.items()}
    scores = {name: _scores(llm.generate(prompts[:2], scored)) for name, llm in engines.items()}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    singles: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(load.rounds):
        for name in sorted(engines, reverse=bool(turn % 2)):
            started = time.perf_counter()
            engines[name].generate(prompts, greedy)
            speeds[name].append(load.num_prompts * load.num_tokens / (time.perf_counter() - started))
            started = time.perf_counter()
            engines[name].generate(prompts[:1], greedy)
            singles[name].append(time.perf_counter() - started)
    mine, other = (
        Side(n, statistics.median(speeds[n]), statistics.median(singles[n]), tuple(speeds[n]))
        for n in (item.name, against)
    )
    pairs = [
        (a, b)
        for one, two in zip(outputs[item.name], outputs[against], strict=True)
        for a, b in zip(one, two, strict=True)
    ]
    return Report(
        item.family,
        mine,
        other,
        sum(a == b for a, b in pairs) / len(pairs),
        max(abs(a - b) for a, b in zip(scores[item.name], scores[against], strict=True)),
        statistics.median(a / b for a, b in zip(speeds[item.name], speeds[against], strict=True)),
        statistics.median(a / b for a, b in zip(singles[item.name], singles[against], strict=True)),
        model or "random, 4 layers of 256",
        load,
        __version__,
        plugins.fingerprint,
        f"{platform.machine()}, Python {platform.python_version()}",
    )


def _scores(answers: list[Any]) -> list[float]:
    """Log-probabilities of the prompts' tokens."""
    return [entry.logprob for done in answers for entry in done.prompt_logprobs or () if entry is not None]


def as_json(report: Report) -> str:
    """Every figure."""
    return json.dumps(asdict(report), indent=2)


def as_markdown(report: Report) -> str:
    """For a release page."""
    mine, other, load = report.plugin, report.reference, report.load
    rows = [
        (f"tokens a second, {load.num_prompts} requests together", "tokens_per_second", ".1f", report.speed_ratio),
        ("seconds for one request alone", "single_seconds", ".3f", report.latency_ratio),
    ]
    table = "\n".join(
        f"| {what} | {getattr(mine, field):{form}} | {getattr(other, field):{form}} | {ratio:.2f} |"
        for what, field, form, ratio in rows
    )
    return f"""\
# {report.family}.{mine.name} against {other.name}

| | `{mine.name}` | `{other.name}` | ratio |
| --- | --- | --- | --- |
{table}

Parity: {report.equal_tokens:.1%} of the greedy tokens are equal; the log-probabilities of prompts differ by at most
{report.max_logprob_error:.2g}.

Model: {report.model}. Prompts of {load.prompt_len} tokens, {load.num_tokens} generated; {load.rounds} rounds,
taken in turns in one process; medians, ratios medians of the rounds' ratios.
fwk {report.fwk}, plugins {report.fingerprint}, {report.machine}.
"""
