"""What installed plugins cost that nobody selected: seconds of start-up, and decode throughput.

    python -m benchmarks.plugin_cost [--plugins 30] [--rounds 12]

Thirty packages, each with a plugin and an option of its own, in six families in turn, ranked below ours. Start-up is
the time in which a fresh process finds all plugins and reads a command line, with and without them in turn.
Throughput is that of two engines on the same tiny random model in one process, which decode in turn; their output
must be the same. It is also given in tokens by second of CPU time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path

from tests.helpers.packages import write_package
from tests.helpers.tiny import TINY

FAMILIES = (
    ("attention_backends", "AttentionBackendSpec"),
    ("schedule_policies", "SchedulePolicySpec"),
    ("samplers", "SamplerSpec"),
    ("prefix_caches", "PrefixCacheSpec"),
    ("quantizers", "QuantizerSpec"),
    ("executors", "ExecutorSpec"),
)
SOURCE = """
from fwk import {spec}, Options, hookimpl, option

class Mine(Options):
    extra_{number}: int = option({number}, "Of plugin {number}.", ge=0)

@hookimpl
def {hook}():
    return [{spec}(name="extra{number}", load="nowhere:Nothing", rank=-99, options=Mine)]
"""
START = """
import time
started = time.perf_counter()
from fwk.cli.common import read_options
from fwk.cli.option_parsing import Parser
plugins, *_ = read_options(Parser("fwk serve", allow_abbrev=False), ["--page-size", "16"])
print(time.perf_counter() - started, len(plugins.all()), len(plugins.broken))
"""
PROMPTS = [[(7 * i + k) % 250 + 20 for i in range(16)] for k in range(8)]


def write_packages(folder: Path, count: int) -> None:
    """The third parties."""
    for number in range(count):
        hook, spec = FAMILIES[number % len(FAMILIES)]
        write_package(folder, f"extra{number}", {f"extra_{number}": SOURCE.format(spec=spec, hook=hook, number=number)})


def start(folder: Path | None) -> tuple[float, int]:
    """Seconds to read a command line in a fresh process, and the plugins it found."""
    environment = {**os.environ, **({"PYTHONPATH": str(folder)} if folder is not None else {})}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    seconds, found, broken = done.stdout.split()
    assert broken == "0", done.stderr
    return float(seconds), int(found)


def startup(folder: Path, count: int, rounds: int) -> None:
    """Print what a plugin adds."""
    pairs = [(start(None), start(folder)) for _ in range(rounds + 1)][1:]  # the first writes bytecode
    (_, few), (_, many) = pairs[0]
    assert many - few == count
    without, alongside = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    added = statistics.median((b[0] - a[0]) / count for a, b in pairs)
    print(f"start-up, {few} plugins: {without * 1e3:.0f} ms; {many} plugins: {alongside * 1e3:.0f} ms")
    print(f"a plugin adds {added * 1e3:.2f} ms (median of {rounds} pairs)")


def throughput(folder: Path, count: int, rounds: int) -> None:
    """Print the ratio of decode throughput alongside the others to that without."""
    import torch

    import fwk
    from fwk import SamplingParams
    from fwk.plugins import discover

    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    plain = discover(points=[point for point in entry_points(group="fwk") if point.dist and point.dist.name == "fwk"])
    sys.path.insert(0, str(folder))
    full = discover()
    assert len(full.all()) - len(plain.all()) == count
    options = {"load_format": "dummy", "max_total_tokens": 4096, "max_running_requests": 8, "random_seed": 0}
    torch.set_num_threads(1)
    engines = [fwk.LLM(str(model), plugins=plugins, **options) for plugins in (plain, full)]  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    rates: dict[str, list[list[float]]] = {"wall": [[], []], "CPU": [[], []]}
    for round_ in range(rounds + 1):
        outputs: list[list[list[int]]] = []
        for i in (0, 1) if round_ % 2 else (1, 0):
            began = time.perf_counter(), time.process_time()
            answers = engines[i].generate(PROMPTS, sampling)
            taken = time.perf_counter() - began[0], time.process_time() - began[1]
            for clock, seconds in zip(("wall", "CPU"), taken, strict=True):
                rates[clock][i].append(sum(len(a.token_ids) for a in answers) / seconds)
            outputs.append([a.token_ids for a in answers])
        assert outputs[0] == outputs[1]
    for clock, (plain_rates, full_rates) in rates.items():
        ratios = [b / a for a, b in zip(plain_rates[1:], full_rates[1:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"decode, {clock} time: {statistics.median(plain_rates[1:]):.0f} tokens a second without them", end="; ")
        print(f"ratio with {count} more {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {rounds} pairs)")
    for engine in engines:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugins", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_packages(folder, arguments.plugins)
        startup(folder, arguments.plugins, arguments.rounds)
        throughput(folder, arguments.plugins, 2 * arguments.rounds)


if __name__ == "__main__":
    main()
