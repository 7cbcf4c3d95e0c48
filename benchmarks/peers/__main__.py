"""``python -m benchmarks.peers``: set the peers up, run the rounds, write the page."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.peers.engines import (
    GEMMA,
    PACKED,
    SCENARIOS,
    SHAPED,
    TORCH_ISA,
    Engine,
    default_root,
    engines,
    isa_environment,
    opened,
    vocab_size,
)
from benchmarks.peers.environments import Environments
from benchmarks.peers.page import page
from benchmarks.peers.rounds import Ready, Rounds, read, to_stderr
from benchmarks.peers.sessions import Tokenize
from fwk.config import ModelOptions
from fwk.errors import ConfigError, FwkError
from fwk.setup.checkpoint import OpenedModel
from fwk.text.model_text import ModelText
from fwk_kit.bench.workload import Maker
from fwk_loaders.dummy.tokenizer import build_tokenizer


def main() -> int:
    arguments = _arguments()
    os.environ.update(isa_environment(arguments.isa))  # fwk's servers inherit it; peers are as they were compiled
    default = opened()
    text = ModelText(default.checkpoint, ModelOptions(), default.config.vocab_size)
    tokenize = Tokenize(text.chat_ids, text.tokenizer)
    environments = Environments(arguments.root, default, to_stderr, arguments.jobs)
    every = engines(environments, tokenize, default.eos_token_ids[0])
    chosen = _chosen(every, arguments.engines)
    words = arguments.scenarios.split(",")
    scenarios = [name for word in words for name in (PACKED if word == "packed" else (word,))]
    unknown = [name for name in scenarios if name not in SCENARIOS]
    if unknown:
        raise ConfigError(f"no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    chosen = [engine for engine in chosen if set(engine.scenarios) & set(scenarios)]
    ready, left_out = _prepare(chosen)
    if arguments.setup:
        return 1 if left_out else 0
    records = arguments.records or arguments.root / f"{arguments.date}.jsonl"
    until = time.monotonic() + 60 * arguments.minutes
    rounds = Rounds(_makers(scenarios, default), records, arguments.long, arguments.limit, until, to_stderr)
    rounds.run(ready, scenarios, arguments.repeat, arguments.apart)
    left_out += [f"- {name} in {scenario}: {why}" for (name, scenario), why in rounds.failures.items()]
    command = f"benchmarks/peers.sh {' '.join(sys.argv[1:])}".strip()
    content = page(arguments.date, command, every, read(records), left_out)
    arguments.out.write_text(content, encoding="utf-8")
    print(content)
    return 0


def _arguments() -> argparse.Namespace:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser = argparse.ArgumentParser(prog="benchmarks/peers.sh", description=__doc__)
    parser.add_argument("--root", type=Path, default=default_root(), help="the peers' folder (default: %(default)s)")
    parser.add_argument("--engines", help="names or beginnings of names, with commas between (default: all)")
    usual = [name for name in SCENARIOS if vocab_size(name) is None]
    told = (
        f"default: %(default)s; also {','.join(SHAPED)}, with up to 25 GB of random weights, and packed: "
        f"{','.join(PACKED)}, one GGUF file for fwk and llama.cpp's wheel, 10 GB"
    )
    parser.add_argument("--scenarios", default=",".join(usual), help=told)
    parser.add_argument("--isa", choices=list(TORCH_ISA), help="fwk's own kernels, torch and oneDNN use no more")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, added to those recorded (default: %(default)s)")
    parser.add_argument(
        "--long", type=float, default=40, help="a run of more seconds is not repeated (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a run has failed")
    parser.add_argument("--minutes", type=float, default=60, help="no run starts later (default: %(default)s)")
    told = "all rounds of a scenario one after another, with engines started once for it: fewer minutes"
    parser.add_argument("--apart", action="store_true", help=told)
    parser.add_argument("--setup", action="store_true", help="set the peers up and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once, for llama.cpp")
    parser.add_argument("--date", default=today)
    parser.add_argument(
        "--records", type=Path, help="where each run is kept (default: DATE.jsonl in the peers' folder)"
    )
    parser.add_argument("--out", type=Path, help="the page (default: benchmarks/results/DATE-peers.md)")
    arguments = parser.parse_args()
    if arguments.out is None:
        arguments.out = Path(__file__).parents[1] / "results" / f"{arguments.date}-peers.md"
    return arguments


def _chosen(every: list[Engine], names: str | None) -> list[Engine]:
    if names is None:
        return every
    wanted = names.split(",")
    for name in wanted:
        if not any(engine.name.startswith(name) for engine in every):
            raise ConfigError(f"no engine begins with {name!r}; there are {', '.join(e.name for e in every)}")
    return [engine for engine in every if engine.name.startswith(tuple(wanted))]


def _prepare(chosen: list[Engine]) -> tuple[list[Ready], list[str]]:
    """Those that can run, and a sentence for each of the others."""
    ready: list[Ready] = []
    left_out: list[str] = []
    for engine in chosen:
        try:
            version, start = engine.prepare()
        except FwkError as error:
            to_stderr(f"{engine.name} is left out: {error}")
            left_out.append(f"- {engine.name}: {error}")
            continue
        ready.append(Ready(engine, version, start))
    return ready, left_out


def _makers(scenarios: list[str], default: OpenedModel) -> dict[str, Maker]:
    """Prompts have the same number of tokens for every engine that serves the model."""
    makers = {name: Maker(default.checkpoint.tokenizer(), "") for name in scenarios if name != "G1"}
    for name in scenarios:
        if size := vocab_size(name):
            makers[name] = Maker(build_tokenizer(size, name), "")
    if "G1" in scenarios:
        makers["G1"] = Maker(opened(GEMMA).checkpoint.tokenizer(), "")
    return makers


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("benchmarks/peers.sh: ended")
    )  # engines are stopped on the way out
    try:
        sys.exit(main())
    except FwkError as error:
        sys.exit(f"benchmarks/peers.sh: {error}")
