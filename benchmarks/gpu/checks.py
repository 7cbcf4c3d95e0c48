"""The checks: each returns its numbers, and raises what is wrong."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import fwk
from benchmarks.gpu.cases import MODELS, WORKS, Check, Work, file_of, reference_of
from benchmarks.gpu.references import TOP, WINDOW, Reference, options_of, prompts, saved
from fwk import SamplingParams
from fwk.plugins import PluginSet
from fwk_quant.fp8 import scaled

Numbers = dict[str, Any]


class Skipped(Exception):
    """Why a check says nothing here."""


class Bench:
    """What the checks of a process have in common: the device, and the model that was loaded last.

    device: of torch, for tensors of the checks' own; name: of ``fwk.LLM``. to_run: changes a check before it is run.
    """

    def __init__(
        self, name: str, device: torch.device, out: Path, references: Path, plugins: PluginSet | None = None
    ) -> None:
        self.name, self.device, self.out, self.references, self.plugins = name, device, out, references, plugins
        self.models, self.works = MODELS, WORKS
        self._stack = ExitStack()
        self._loaded: tuple[str, fwk.LLM] | None = None

    def llm(self, check: Check, options: dict[str, Any]) -> fwk.LLM:
        """The model with these options, loaded unless it was the last."""
        key = json.dumps([check.model, options], sort_keys=True)
        if self._loaded is None or self._loaded[0] != key:
            self.close()
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            where = saved(self.models[check.model], Path(folder) / check.model)
            llm = fwk.LLM(str(where), device=self.name, plugins=self.plugins, **options)
            self._loaded = key, self._stack.enter_context(llm)
        llm = self._loaded[1]
        step = llm.engine.info.chosen["step"]
        if check.is_captured is not None and step.startswith("captured") != check.is_captured:
            asked = "captured" if check.is_captured else "computed operator by operator"
            raise AssertionError(f"steps were to be {asked}, and are {step}")
        return llm

    def close(self) -> None:
        """Give the model up."""
        self._loaded = None
        self._stack.close()
        gc.collect()

    def told(self, check: Check) -> str:
        """How the last model computes steps."""
        return "" if self._loaded is None else f"step={self._loaded[1].engine.info.chosen['step']}"


def versions(bench: Bench, check: Check) -> Numbers:
    names = ("torch", "triton", "numpy", "transformers", "flashinfer-python", "fwk")
    found: Numbers = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    if bench.device.type == "cuda":
        found |= {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def plugins(bench: Bench, check: Check) -> Numbers:
    """That the package was installed with its entry points, and all of it can be imported."""
    ended = subprocess.run(
        [sys.executable, "-m", "fwk", "plugins", "doctor"], capture_output=True, text=True, check=False
    )
    last = (ended.stdout + ended.stderr).strip().splitlines()[-1:]
    if ended.returncode:
        raise AssertionError(f"fwk plugins doctor ended with {ended.returncode}: {' '.join(last)}")
    return {"doctor": " ".join(last)[:80]}


def modules(bench: Bench, check: Check) -> Numbers:
    """Each kernel module that was built beforehand loads; with FLASHINFER_DISABLE_JIT=1 no other would be compiled."""
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Skipped("flashinfer is not installed") from error
    built = sorted((Path(str(flashinfer.__file__)).parent / "data" / "aot").glob("*/*.so"))
    if not built and bench.device.type != "cuda":
        raise Skipped("no module is built for this device")
    if not built:
        raise AssertionError("no module was built beforehand: FlashInfer would compile for minutes")
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    for path in built:
        tvm_ffi.load_module(str(path))
    return {"modules": len(built)}


def copies(bench: Bench, check: Check) -> Numbers:
    size = min(2**32, torch.cuda.mem_get_info()[0] // 4) if bench.device.type == "cuda" else 2**20
    x = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    y, seconds = torch.empty_like(x), 0.0
    for _ in range(2):
        seconds = _timed(bench, lambda: y.copy_(x))
    return {"copy GB/s": 2 * size / seconds / 1e9}


def row_products(bench: Bench, check: Check) -> Numbers:
    """fp8 by rows, at the sizes of an 8B model, against float64."""
    _why_not(bench, is_block=False)
    shapes, tokens = _fp8_sizes(bench)
    worst, slowest = 0.0, 0.0
    for rows, columns in shapes:
        numbers, scales, exact = _fp8_matrix(bench, rows, columns)
        for count in tokens:
            x = _random(bench, count, columns, seed=1).bfloat16()

            def product(x: torch.Tensor = x, n: torch.Tensor = numbers, s: torch.Tensor = scales) -> torch.Tensor:
                return scaled.row_product(x, n, s, None, is_fast=check.settings["is_fast"])

            worst = max(worst, _error(product(), _rounded(x, None) @ exact.T))
            slowest = max(slowest, _timed(bench, product))
    assert worst < 0.02, f"relative error {worst:.3g}"
    return {"error": worst, "slowest ms": slowest * 1e3}


def block_products(bench: Bench, check: Check) -> Numbers:
    """The same by blocks, also where a row of scales is no multiple of four long."""
    shapes, tokens = _fp8_sizes(bench)
    _why_not(bench, is_block=True)
    spacing = scaled.scale_spacing(bench.device) if bench.device.type == "cuda" else 4
    assert spacing is not None, "no product of blocks' scales is right where a row has no multiple of four"
    worst = 0.0
    for rows, columns in [*shapes[:2], (2048, 768) if bench.device.type == "cuda" else (256, 768)]:
        numbers, _, _ = _fp8_matrix(bench, rows, columns)
        scales = torch.rand(-(-rows // 128), columns // 128, device=bench.device) + 0.5
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        exact = numbers.double() * spread.double()
        for count in tokens:
            x = _random(bench, count, columns, seed=1).bfloat16()
            y = scaled.block_product(x, numbers, scaled.padded_block_scales(scales, spacing))
            worst = max(worst, _error(y, _rounded(x, 128) @ exact.T))
    assert worst < 0.02, f"relative error {worst:.3g}"
    return {"error": worst, "spacing": spacing}


def _why_not(bench: Bench, *, is_block: bool) -> None:
    why = scaled.why_not(4096, 4096, is_block=is_block, dtype=torch.bfloat16, device=bench.device)
    if why is not None:
        raise Skipped(f"the scaled product {why}")


def _fp8_sizes(bench: Bench) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    if bench.device.type != "cuda":
        return [(64, 128), (128, 256)], (1, 3)
    return [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], (1, 3, 8, 64, 2048)


def _fp8_matrix(bench: Bench, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 numbers, scales of rows, and both together in float64."""
    weight = _random(bench, rows, columns) * 0.02
    numbers, scales = scaled.quantise(weight)
    return numbers, scales[:, 0].contiguous(), numbers.double() * scales.double()


def _random(bench: Bench, *shape: int, seed: int = 0) -> torch.Tensor:
    """Made on the device: the host takes seconds for the numbers of a large matrix."""
    return torch.randn(shape, generator=torch.Generator(bench.device).manual_seed(seed), device=bench.device)


def _rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    numbers, scales = scaled.quantise(x, group)
    return numbers.double() * scales.double().repeat_interleave(x.shape[1] // scales.shape[1], 1)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def _cuda_only(bench: Bench) -> None:
    if bench.device.type != "cuda":
        raise Skipped("is about CUDA itself")


def graph(bench: Bench, check: Check) -> Numbers:
    """A graph of torch's own operators, captured and replayed as decode steps are."""
    _cuda_only(bench)
    from fwk.interfaces.graphs import StepSize
    from fwk_devices.cuda.graph import CudaCapture

    x = torch.arange(1024.0, device=bench.device)
    made = CudaCapture().capture(lambda size: (x * 2, None), StepSize(1, 1, 1, 1))
    x.fill_(3.0)
    found, _ = made.replay(StepSize(1, 1, 1, 1))
    assert bool((found == 6).all()), "a replay did not read its input anew"
    return {}


def failed_capture(bench: Bench, check: Check) -> Numbers:
    """A capture that the host's waiting spoils: afterwards memory is given back, and steps, graphs and noise work."""
    _cuda_only(bench)
    from fwk.interfaces.graphs import NotCapturable, StepSize
    from fwk_devices.cuda.graph import CudaCapture

    capture, size = CudaCapture(), StepSize(1, 1, 1, 1)
    x = torch.ones(2**24, device=bench.device)
    before = torch.cuda.current_stream()

    def waits(size: StepSize) -> Any:
        return x * float((x * 2).sum().item()), None

    try:
        capture.capture(waits, size)
    except NotCapturable as error:
        reason = str(error)
    else:
        raise AssertionError("a step that waits was captured")
    assert torch.cuda.current_stream() == before, "the capture's stream stayed the current one"
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    freed = held - torch.cuda.memory_reserved()
    assert float((x + 1).sum()) == 2 * len(x), "an eager step after it is wrong"
    made = capture.capture(lambda size: (x * 5, None), size)
    assert float(made.replay(size)[0][0]) == 5, "a capture after it is wrong"
    noise = float(torch.rand(1, device=bench.device))
    return {"reason": reason[:120], "MiB given back": freed / 2**20, "noise": noise}


def copy_order(bench: Bench, check: Check) -> Numbers:
    """What is copied to pinned memory is there once an event after it has come, and not made of what follows."""
    _cuda_only(bench)
    x = torch.zeros(2**20, dtype=torch.int32, device=bench.device)
    host = torch.zeros(2**20, dtype=torch.int32).pin_memory()
    for turn in range(1, 50):
        x.fill_(turn)
        host.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        x.fill_(-1)
        event.synchronize()
        assert bool((host == turn).all()), f"copy {turn} holds something else"
    return {}


def parity(bench: Bench, check: Check) -> Numbers:
    """After each beginning of the reference's tokens some more, until one is another than the reference's."""
    work = bench.works[check.settings["work"]]
    reference = Reference(file_of(bench.references, *reference_of(check)))
    beginnings = prompts(bench.models[check.model], work, check.settings["seed"])
    windows = reference.windows(beginnings)
    llm = bench.llm(check, options_of(work, check.options))
    num_tokens = min(WINDOW, work.num_tokens)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=1, ignore_eos=True)
    done = llm.generate([prompt for _, _, prompt in windows], sampling)
    worst, num_same, num_wrong = 0.0, 0, 0
    for (sequence, first, _), one in zip(windows, done, strict=True):
        for at, token in enumerate(one.logprobs or [], first):
            if token.token_id != int(reference.tokens[sequence, at]):
                worst, num_wrong = max(worst, reference.doubt(sequence, at, token.token_id)), num_wrong + 1
                break
            num_same += 1
            worst = max(worst, reference.difference(sequence, at, token.token_id, token.logprob))
    numbers = {"worst": worst, "alike": f"{num_same}/{work.num_seqs * work.num_tokens}"}
    assert worst <= check.tolerance, f"log-probabilities differ by {worst:.3g}, more than {check.tolerance}: {numbers}"
    assert num_same > work.num_seqs * work.num_tokens // 2, f"most tokens are others: {numbers}"
    return numbers


def equal(bench: Bench, check: Check) -> Numbers:
    """With and without overlap, of prompts of many chunks: what is overwritten on its way shows here."""
    work = bench.works["chunks"]
    sampling = SamplingParams(max_tokens=work.num_tokens, temperature=0.0, logprobs=1, ignore_eos=True)
    found: list[list[Any]] = []
    for more in ({}, {"disable_overlap_schedule": True}):
        llm = bench.llm(check, options_of(work, check.options | more))
        done = [llm.generate(prompts(bench.models[check.model], work, seed), sampling) for seed in range(3)]
        found.append(
            [[(token.token_id, token.logprob) for token in one.logprobs or []] for some in done for one in some]
        )
    others = [(mine, other) for mine, other in zip(*found, strict=True) if mine != other]
    worst = max((abs(a[1] - b[1]) for pair in others for a, b in zip(*pair, strict=True)), default=0.0)
    assert not others, f"{len(others)} of {len(found[0])} sequences are others with overlap, by up to {worst:.3g}"
    return {"sequences": len(found[0])}


def suite(bench: Bench, check: Check) -> Numbers:
    """The attention contract's core, on poisoned caches."""
    _cuda_only(bench)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    words = f"({' or '.join(check.settings['words'])}) and {check.settings['backend']}"
    command += ["-m", "gpu", "-k", words, "-n", str(check.settings["at_once"])]
    command += ["--dist", "load", "--durations", "5", "-o", "filterwarnings=default", "-p", "no:benchmark"]
    # Plugins of pytest's that happen to be there may warn, and the kernels are not to be interpreted.
    given = {"capture_output": True, "text": True, "env": {**os.environ, "TRITON_INTERPRET": "0"}}
    try:
        ended = subprocess.run(command, check=False, timeout=check.seconds - 2, **given)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        print(said[-4000:], file=sys.stderr)
        raise AssertionError(f"not done in {late.timeout:.0f} s: {said.strip()[-200:]}") from None
    print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)  # to the log
    lines = ended.stdout.strip().splitlines() or [(ended.stderr.strip() or "no word").splitlines()[-1]]
    if ended.returncode == 5:
        raise Skipped("no test is about this backend here")
    if "skipped" in lines[-1] and "passed" not in lines[-1] and "failed" not in lines[-1]:
        raise Skipped(lines[-1].strip("= "))
    if ended.returncode:
        raise AssertionError(
            "; ".join(line for line in lines if line.startswith(("FAILED", "ERROR")))[:600] or lines[-1]
        )
    return {"suite": lines[-1].strip("= ")}


def serve(bench: Bench, check: Check) -> Numbers:
    """The command as a user types it: health, completions of token ids, equal to ``fwk.LLM``'s; SIGTERM."""
    at_once = check.settings.get("at_once", ())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in check.options.items()]
    with tempfile.TemporaryDirectory() as folder:
        where = saved(bench.models[check.model], Path(folder) / check.model)
        address, log = "127.0.0.1:8417", Path(folder) / "log"
        command = [sys.executable, "-m", "fwk", "serve", str(where), "--load-format", "dummy", "--skip-tokenizer-init"]
        command += ["--port", "8417", "--device", bench.name, *flags]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            started = time.perf_counter()
            _wait_for(f"http://{address}/health", server, log, check.seconds - 5)
            numbers: Numbers = {"seconds to health": time.perf_counter() - started}
            asked = prompts(bench.models[check.model], Work(8, 32, 8), 0)
            body = {"prompt": asked, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            reply = _post(f"http://{address}/v1/completions", body)
            served = [choice["token_ids"] for choice in sorted(reply["choices"], key=lambda choice: choice["index"])]
            for count in at_once:
                seconds = _load(address, check.model, bench, count)
                numbers[f"tok/s at {count} served"] = count * 64 / seconds
            server.terminate()
            assert server.wait(15) == 0, f"ended with {server.returncode} on SIGTERM"
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
            print(log.read_text(errors="replace")[-8000:], file=sys.stderr)  # to the log that is kept
        if not at_once:
            llm = bench.llm(check, {"load_format": "dummy", **check.options})
            done = llm.generate(asked, SamplingParams(max_tokens=8, temperature=0.0, logprobs=TOP, ignore_eos=True))
            numbers |= _alike(done, served, check.tolerance)
            bench.close()
    return numbers


def _alike(done: Sequence[Any], served: list[list[int]], tolerance: float) -> Numbers:
    """The server may put prompts together otherwise, and sums round otherwise: another token must be as likely."""
    num_same = 0
    for i, (one, tokens) in enumerate(zip(done, served, strict=True)):
        for at, (mine, token) in enumerate(zip(one.logprobs, tokens, strict=True)):
            if mine.token_id == token:
                num_same += 1
                continue
            less = mine.logprob - dict(mine.top).get(token, float("-inf"))
            assert less <= tolerance, f"token {at} of prompt {i} is less likely than that of fwk.LLM, by {less:.3g}"
            break
    count = sum(map(len, served))
    assert num_same > count // 2, f"{num_same} of {count} tokens are those of fwk.LLM"
    return {"alike": f"{num_same}/{count}"}


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise AssertionError(f"the server ended with {server.returncode}: {' / '.join(last)[:500]}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"no health after {seconds:.0f} s")


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def _load(address: str, model: str, bench: Bench, count: int) -> float:
    """Seconds of so many prompts of 128 tokens at once, with 64 tokens each."""
    asked = prompts(bench.models[model], Work(count, 128, 64), 1)
    body = {"prompt": asked, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    _post(f"http://{address}/v1/completions", body)
    return time.perf_counter() - started


def load(bench: Bench, check: Check) -> Numbers:
    """Seconds to load and capture, and the memory by what has it."""
    started = time.perf_counter()
    llm = bench.llm(check, _speed_options(check))
    memory = llm.engine.info.memory
    seconds = time.perf_counter() - started
    return {"seconds": seconds, **{f"{name} MiB": size // 2**20 for name, size in memory.items()}}


def _speed_options(check: Check) -> dict[str, Any]:
    return {"load_format": "dummy", "prefix_cache": "none", **check.options}


def decode(bench: Bench, check: Check) -> Numbers:
    """Twice: seconds of all tokens less those of the first, by the tokens between."""
    llm = bench.llm(check, _speed_options(check))
    work = Work(*(check.settings[name] for name in ("num_seqs", "num_prompt", "num_tokens")))
    asked = prompts(bench.models[check.model], work, 0)
    _generate(llm, asked, 2)
    numbers: Numbers = {}
    for turn in (1, 2):
        first, every = (_generate(llm, asked, count) for count in (1, work.num_tokens))
        step = (every - first) / (work.num_tokens - 1)
        name = "ms a token at 1" if work.num_seqs == 1 else f"tok/s {check.settings['figure']}"
        numbers[f"{name} ({turn})"] = step * 1e3 if work.num_seqs == 1 else work.num_seqs / step
    return numbers


def _generate(llm: fwk.LLM, asked: list[list[int]], count: int) -> float:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(asked, sampling)
    return time.perf_counter() - started


def prefill(bench: Bench, check: Check) -> Numbers:
    llm = bench.llm(check, _speed_options(check))
    work = Work(check.settings["num_seqs"], check.settings["num_prompt"], 1)
    asked = prompts(bench.models[check.model], work, 0)
    _generate(llm, asked[:1], 1)
    count = work.num_seqs * work.num_prompt
    return {f"prefill tok/s ({turn})": count / _generate(llm, asked, 1) for turn in (1, 2)}


def profile(bench: Bench, check: Check) -> Numbers:
    """Of decode steps: the kernels that take the most time, and how long the device had nothing to do."""
    llm = bench.llm(check, _speed_options(check))
    asked = prompts(bench.models[check.model], Work(check.settings["num_seqs"], 16, 1), 0)
    _generate(llm, asked, 2)
    with torch.profiler.profile() as found:
        seconds = _generate(llm, asked, 9)
    events = found.key_averages()
    field = "self_device_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
    events = sorted(events, key=lambda event: -getattr(event, field))
    busy = sum(getattr(event, field) for event in events)
    with (bench.out / "profile.txt").open("a", encoding="utf-8") as file:
        file.write(
            f"{check.name}\n" + "".join(f"{getattr(e, field):12.0f} us {e.count:6} {e.key}\n" for e in events[:8])
        )
    return {"idle us a step": max(0.0, seconds * 1e6 - busy) / 9, "first kernel": events[0].key[:40]}


def _timed(bench: Bench, run: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if bench.device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    run()
    wait()
    return max(time.perf_counter() - started, 1e-9)


_ALL: tuple[Callable[[Bench, Check], Numbers], ...] = (
    versions,
    plugins,
    modules,
    copies,
    row_products,
    block_products,
    graph,
    failed_capture,
    copy_order,
    parity,
    equal,
    suite,
    serve,
    load,
    decode,
    prefill,
    profile,
)
FUNCTIONS = {made.__name__: made for made in _ALL}
