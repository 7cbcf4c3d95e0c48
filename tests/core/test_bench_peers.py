"""`benchmarks/peers.sh`: workers are timed as servers are, rounds are interleaved, ratios point the right way."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from benchmarks import packed_shapes
from benchmarks.peers import environments, folder
from benchmarks.peers.engines import Engine
from benchmarks.peers.goals import RATE, TTFT, Goal, judge, ratios
from benchmarks.peers.page import page
from benchmarks.peers.rounds import Ready, Record, Rounds, proportional_memory, read
from benchmarks.peers.sessions import Session, Tokenize, in_process
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from fwk import LLM, SamplingParams
from fwk.errors import ConfigError
from fwk_kit.bench.load import Reply
from fwk_kit.bench.servers import Running
from fwk_kit.bench.summary import Summary, summarise
from fwk_kit.bench.workload import WORDS, Asked, Maker, Workload

WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from worker import serve

def run(concurrency, requests):
    print("a library says something")
    if requests[0]["num_output"] == 99:
        time.sleep(60)
    ends = [[10.0 + 0.5 * (i + 1) for i in range(r["num_output"])] for r in requests]
    return {"seconds": 2.0, "replies": [{"sent": 10.0, "times": t, "token_ids": r["prompt"][: len(t)]}
                                        for t, r in zip(ends, requests)]}

serve(lambda: run)
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token a word."""
    words = {word: index for index, word in enumerate(["?", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


@contextmanager
def worker(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Session]:
    program = tmp_path / "engine.py"
    program.write_text(WORKER)
    here = str(Path(environments.__file__).parent)
    command = [sys.executable, str(program), here]
    with in_process("fake", command, Tokenize(lambda _: [1, 2], tokenizer), tmp_path / "log") as session:
        yield session


def asked(count: int) -> list[Asked]:
    words = " ".join(WORDS[:count])
    return [
        Asked("/v1/completions", {"prompt": words}, 0.0, count, count),
        Asked("/", {"prompt": words}, 0.0, count, 2),
    ]


def test_a_worker_is_summarised_as_a_server_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    workload = Workload("S1", concurrency=2)
    with worker(tmp_path, tokenizer) as session:
        replies, seconds = session.load(workload, asked(4), 10)
        assert replies[0].text == " ".join(WORDS[:4])  # the prompt's ids went there and back
        summary = summarise("S1", replies, seconds)
        assert session.running.cold_start is not None
        with pytest.raises(TimeoutError):
            session.load(workload, [Asked("/", {"prompt": "river"}, 0.0, 1, 99)], 0.3)
    assert (summary.output_rate, summary.output_tokens) == (3.0, 6)
    assert (summary.ttft["p50"], summary.tpot["p50"]) == (500.0, 500.0)
    assert "a library says something" in (tmp_path / "log").read_text()


def test_a_paused_engine_has_no_processor(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with worker(tmp_path, tokenizer) as session:
        process = psutil.Process(session.running.pid)
        session.pause()
        deadline = time.monotonic() + 5
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, process.status()
            time.sleep(0.01)
        session.go_on()
        assert session.load(Workload("S1"), asked(2), 10)[1] == 2.0
    assert not process.is_running()


def test_a_worker_that_ends_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    tokenize = Tokenize(lambda _: [], tokenizer)
    with (
        pytest.raises(ConfigError, match="gone ended with status 3"),
        in_process("gone", command, tokenize, tmp_path / "l"),
    ):
        pass


class Fake(Session):
    """Answers each request after ``seconds``; raises what it is told to."""

    def __init__(self, name: str, log: list[str], seconds: float, error: Exception | None) -> None:
        self.running = Running("", cold_start=1.0, peak_rss=2**20, pid=None)
        self._name, self._log, self._seconds, self._error = name, log, seconds, error

    def load(self, workload: Workload, asked: list[Asked], limit: float) -> tuple[list[Reply], float]:
        if workload.name == "warm-up":
            return [], 0.0
        self._log.append(f"{self._name} {workload.name}")
        if self._error is not None:
            raise self._error
        reply = Reply(0.0, self._seconds, [self._seconds / 2, self._seconds], 1, 2, "a b")
        return [reply], self._seconds

    def pause(self) -> None:
        self._log.append(f"{self._name} pauses")

    def go_on(self) -> None:
        self._log.append(f"{self._name} continues")


def ready(name: str, log: list[str], seconds: float = 1.0, error: Exception | None = None, **given: Any) -> Ready:
    @contextmanager
    def start(_: str) -> Iterator[Session]:
        log.append(f"{name} starts")
        yield Fake(name, log, seconds, error)
        log.append(f"{name} stops")

    return Ready(Engine(name, "bf16", "HTTP", lambda: ("1", start), **given), "1", start)


@pytest.fixture
def rounds(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    monkeypatch.setattr("benchmarks.peers.rounds.read_rate", lambda: 20.0)
    monkeypatch.setattr("benchmarks.peers.rounds.psutil.cpu_percent", lambda _: 3.0)
    makers = dict.fromkeys(("S1", "S4"), Maker(tokenizer, ""))
    return Rounds(makers, tmp_path / "records.jsonl", long=10, limit=5, until=math.inf, say=lambda _: None)


def test_rounds_take_engines_in_turn(rounds: Rounds) -> None:
    log: list[str] = []
    rounds.run([ready("a", log), ready("b", log, stays=True)], ["S1", "S4"], 2)
    once = ["a starts", "a S1", "a stops", "b starts", "b S1", "b pauses", "a starts", "a S4", "a stops"]
    assert log[: len(once)] == once
    assert log[len(once) : len(once) + 3] == ["b continues", "b S4", "b pauses"]
    assert log[-4:] == ["b S4", "b pauses", "b continues", "b stops"]  # a paused process would hear no signal
    assert log.count("b starts") == 1
    rounds.run([ready("a", log)], ["S1"], 1)
    assert [(r.engine, r.round) for r in read(rounds.records) if r.scenario == "S1"] == [
        *(("a", 1), ("b", 1), ("a", 2), ("b", 2)),
        ("a", 3),
    ]


def test_rounds_apart_start_each_engine_once_for_a_scenario(rounds: Rounds) -> None:
    log: list[str] = []
    rounds.run([ready("a", log), ready("b", log)], ["S1", "S4"], 2, is_apart=True)
    half = ["a starts", "a S1", "b starts", "b S1", "a S1", "b S1", "b stops", "a stops"]
    assert log == half + [line.replace("S1", "S4") for line in half]
    assert [(r.engine, r.round) for r in read(rounds.records) if r.scenario == "S4"] == [
        *(("a", 1), ("b", 1), ("a", 2), ("b", 2)),
    ]


def test_memory_counts_shared_pages_once() -> None:
    forks = "import os, time; kept = b'x' * 2**26; os.fork(); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", forks], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(2) == b"\n\n", "of both"
            assert 2**26 < proportional_memory(process.pid) < 1.5 * 2**26
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert proportional_memory(None) == 0


def test_what_fails_or_takes_long_is_not_tried_again(rounds: Rounds) -> None:
    log: list[str] = []
    engines = [
        ready("broken", log, error=ConfigError("no such model")),
        ready("stuck", log, error=TimeoutError()),
        ready("slow", log, seconds=11.0),
        ready("plain", log, scenarios=("S4",)),
    ]
    rounds.run(engines, ["S1", "S4"], 2)
    runs = [line for line in log if line.endswith((" S1", " S4"))]
    assert runs == [f"{name} {s}" for s in ("S1", "S4") for name in ("broken", "stuck", "slow")] + ["plain S4"] * 2
    assert rounds.failures["broken", "S1"] == "no such model"
    assert rounds.failures["stuck", "S4"] == "took more than 5 s"


def test_no_run_starts_after_the_time(rounds: Rounds) -> None:
    log: list[str] = []
    rounds.until = 0.0
    rounds.run([ready("a", log)], ["S1"], 1)
    assert (log, read(rounds.records)) == ([], [])


def record(engine: str, number: int, rate: float, ttft: float, scenario: str = "S1") -> Record:
    times = {"p50": ttft, "p90": ttft, "p99": ttft}
    summary = Summary(scenario, 8, 0, 1.0, 10, 10, rate, rate, 1.0, None, times, times)
    return Record(engine, "1", number, scenario, summary, 0.5 * number, 2**20 * number, 20.0, 1.0)


RECORDS = [
    *(record("fwk bf16", number, rate, 50.0) for number, rate in ((1, 60.0), (2, 80.0))),
    *(record("vLLM bf16", number, rate, 200.0) for number, rate in ((1, 30.0), (2, 20.0))),
    record("OpenVINO bf16", 1, 50.0, 25.0),
]


def test_ratios_are_of_one_round_and_above_one_where_ours_is_faster() -> None:
    assert ratios(RECORDS, "S1", "fwk bf16", "vLLM bf16", RATE) == [2.0, 4.0]
    assert ratios(RECORDS, "S1", "fwk bf16", "vLLM bf16", TTFT) == [4.0, 4.0]
    assert ratios(RECORDS, "S1", "fwk bf16", "OpenVINO bf16", TTFT) == [0.5]
    assert ratios(RECORDS, "S2", "fwk bf16", "vLLM bf16", RATE) == []


def test_a_goal_is_judged_by_the_peer_it_is_hardest_against() -> None:
    assert judge(Goal("S1", "fwk bf16", RATE, (), 2.0), RECORDS) == ("OpenVINO bf16", [1.2])
    assert judge(Goal("S1", "fwk bf16", RATE, ("vLLM bf16",), 2.0), RECORDS) == ("vLLM bf16", [2.0, 4.0])
    assert judge(Goal("S3", "fwk bf16", RATE, (), 2.0), RECORDS) is None
    assert Goal("S4", "fwk int8", TTFT, (), 1 / 0.5).wanted == "<= 0.5 x"


def test_the_page_says_what_was_measured_and_what_was_not() -> None:
    every = [ready(name, []).engine for name in ("fwk bf16", "vLLM bf16", "OpenVINO bf16")]
    text = page("2026-01-01", "benchmarks/peers.sh", every, RECORDS, ["- SGLang: needs CUDA"])
    assert "| vLLM bf16 | 2 | 25.0 (20.0 to 30.0) | 200.0 (200.0 to 200.0) |" in text
    assert "| 3.00 (2.00 to 4.00) |" in text  # ours to vLLM
    assert "1.00 (1.00 to 1.00)" not in text  # none of ours to ours
    assert "| S1 | fwk bf16 | tokens/s | OpenVINO bf16 | >= 1.2 x | 1.20 | met |" in text
    assert "| S2 | fwk int8 | tokens/s | best of all | >= 2.5 x | | not measured |" in text
    assert "| vLLM bf16 | 2 | 0.75 (0.50 to 1.00) | 2 |" in text
    assert text.endswith("## Not measured\n\n- SGLang: needs CUDA\n")
    with pytest.raises(ConfigError, match="nothing was measured; - SGLang"):
        page("2026-01-01", "benchmarks/peers.sh", every, [], ["- SGLang: needs CUDA"])


def test_the_folder_holds_the_numbers_the_loader_gives(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.self_attn.k_proj.weight": (2, 4),
        "model.layers.0.mlp.down_proj.weight": (4, 6),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    made = {name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 7 for name, shape in shapes.items()}

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert shape == shapes[name]
        return made[name]

    sizes = {"hidden_size": 4, "intermediate_size": 6, "vocab_size": 8, "head_dim": 2}
    config = {**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "absent": None}
    checkpoint = SimpleNamespace(
        weights=lambda: SimpleNamespace(names=lambda: list(shapes), tensor=tensor),
        config=lambda: config,
        tokenizer=lambda: tokenizer,
        tokenizer_config=lambda: {"eos_token": "?"},
        generation_config=lambda: {"eos_token_id": [0]},
        chat_template=lambda: "{{ messages }}",
    )
    folder.write(SimpleNamespace(checkpoint=checkpoint), tmp_path / "hf")  # type: ignore[arg-type]
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(stored) == set(shapes) - {"lm_head.weight"}  # tied
    assert all(torch.equal(stored[name], made[name].to(torch.bfloat16)) for name in stored)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["dtype"], "absent" in written) == ("bfloat16", False)
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


@pytest.mark.gate(2)
@pytest.mark.parametrize("architecture", sorted({shape.architecture for shape in packed_shapes.SHAPES.values()}))
def test_a_packed_file_is_served(architecture: str, tmp_path: Path) -> None:
    """Fewer layers and tokens of the least shape of an architecture; every tensor is read, and every value finite."""
    shape = min((s for s in packed_shapes.SHAPES.values() if s.architecture == architecture), key=lambda s: s.hidden)
    small = replace(shape, hidden=256, layers=4, vocab=512, inner=shape.inner and 256, experts=shape.experts and 4)
    packed_shapes.write(tmp_path / "m.gguf", small, "Q4_K_M")
    with LLM(str(tmp_path / "m.gguf"), max_total_tokens=256, dtype="float32") as llm:
        [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1))
    assert output.logprobs is not None
    assert len(output.token_ids) == 3
    assert all(math.isfinite(entry.logprob) for entry in output.logprobs)


def test_llama_keeps_its_tile_configuration(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text("f() { alignas(64) tile_config_t tc = {};\n tc.palette_id = 1;\n _tile_loadconfig(&tc);\n}")
    environments.keep_tile_configuration(source)
    once = source.read_text()
    assert "static tile_config_t tc = {};" in once
    assert once.index('asm volatile("" : : "r"(&tc)') < once.index("_tile_loadconfig(&tc);")
    environments.keep_tile_configuration(source)
    assert source.read_text() == once
    source.write_text("f() {}")
    with pytest.raises(ConfigError, match="not as expected"):
        environments.keep_tile_configuration(source)


def test_a_command_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    made = environments.Environments(tmp_path / "peers", SimpleNamespace(path=tmp_path), lambda _: None, 1)  # type: ignore[arg-type]
    program = tmp_path / "peers" / "llama.cpp" / "bin" / "llama-quantize"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"llama-quantize failed: out of luck; see .*llama-quantize.log"):
        made.gguf("bf16")
    assert not list((tmp_path / "peers" / "models").iterdir())
