"""What travels to a machine with a GPU and without a network, and how large it is.

    python -m benchmarks.gpu.bundle [--out .] [--modules FOLDER | --without-modules]

Makes ``.whl`` (this project's own wheel, without whose entry points no plugin is found, and what the machine lacks),
``.fi/fi.tar.xz`` (FlashInfer without the sources that are never compiled, with modules that were built beforehand) and
``.ref`` (what the CPU says of the small models). Needs a network and pip. ``benchmarks.gpu.modules`` builds modules;
without them FlashInfer's kernels are no part of it, which is enough for a rehearsal.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import BytesParser
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.modules import LIST, MODULES

WHEELS = (
    "msgspec==0.22.0",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "annotated-types==0.8.0",
    "llguidance==1.9.1",
    "fastapi==0.165.0",
    "starlette==1.10.0",
    "uvicorn==0.54.0",
    "httptools==0.9.0",
    "pyzmq==27.3.0",
    "orjson==3.13.0",
    "python-multipart==0.0.34",
    "opentelemetry-api==1.45.2",
    "apache-tvm-ffi==0.1.15.post2",
    "pytest-asyncio==1.5.0",
    "typing-inspection==0.4.5",
    "prompt_toolkit==3.0.53",
    "wcwidth==0.9.4",
    "httpx==0.28.1",
    "httpcore==1.0.9",
)
"""That the machine has not; of Python 3.12 and Linux."""
THERE = frozenset(
    [
        "annotated-doc",
        "anyio",
        "certifi",
        "click",
        "einops",
        "h11",
        "huggingface-hub",
        "idna",
        "jinja2",
        "ninja",
        "numpy",
        "nvidia-ml-py",
        "packaging",
        "pluggy",
        "prometheus-client",
        "psutil",
        "pytest",
        "pyyaml",
        "requests",
        "rich",
        "safetensors",
        "sortedcontainers",
        "tabulate",
        "tokenizers",
        "torch",
        "tqdm",
        "typing-extensions",
        "uvloop",
    ]
)
"""What the wheels need and the machine has, alongside what torch and transformers bring."""
FLASHINFER = "flashinfer-python==0.7.2.post1"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
MOST = 60 * 2**20
"""Bytes of the bundle and the tree together."""
SOURCES = ("batch_*", "page*", "quantization*", "flashinfer_*_binding*", "*.jinja")
"""Of FlashInfer's ``data/csrc``: what its wrappers may ask for by name."""


def travels(name: str) -> bool:
    """Whether a file of FlashInfer's package does: ``name`` is its path there."""
    if fnmatch(name, "flashinfer/data/cutlass/*") or fnmatch(name, "flashinfer/data/cccl/*"):
        return False
    if name.startswith("flashinfer/data/csrc/"):
        return any(fnmatch(name.rpartition("/")[2], pattern) for pattern in SOURCES)
    return True


def built_modules(folder: Path) -> dict[str, Path]:
    """Libraries of the modules that the checks use, by name. Ends the program where one is missing."""
    listed = folder / LIST
    names = listed.read_text(encoding="utf-8").split() if listed.exists() else []
    built = {path.parent.name: path for path in folder.rglob("*.so") if path.stem == path.parent.name}
    missing = [name for name in names if name not in built] if names else ["all of them"]
    if missing:
        raise SystemExit(
            f"FlashInfer's modules for sm_90a are not in {folder} ({missing[0]}): 'make gpu-modules' first"
        )
    return {name: built[name] for name in names}


def pack_flashinfer(unpacked: Path, modules: dict[str, Path], target: Path) -> list[str]:
    """Names in the archive, which is one stream: modules have most of their code in common. modules: by name."""
    files = {f"flashinfer/data/aot/{name}/{name}.so": path for name, path in modules.items()}
    for path in unpacked.rglob("*"):
        name = path.relative_to(unpacked).as_posix()
        if path.is_file() and name.startswith("flashinfer") and travels(name):
            files[name] = path
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.iterdir():
        old.unlink()
    with tarfile.open(target, "w:xz") as archive:
        for name in sorted(files):
            archive.add(files[name], name)
    return sorted(files)


def check_size(sizes: dict[str, int], most: int = MOST) -> None:
    """Print what has how much. Ends the program where it is too much."""
    for name, size in sizes.items():
        print(f"{name:12} {size / 2**20:6.1f} MiB")
    total = sum(sizes.values())
    print(f"{'together':12} {total / 2**20:6.1f} MiB of {most / 2**20:.0f}")
    if total > most:
        largest = max(sizes, key=lambda name: sizes[name])
        raise SystemExit(
            f"the bundle has {total / 2**20:.1f} MiB with the tree, most of it {largest}, and {most / 2**20:.0f} may "
            "travel"
        )


def missing_needs(wheels: Path) -> list[str]:
    """What a wheel needs that neither travels nor is there: ``NAME needs REQUIREMENT``."""
    found: dict[str, list[Requirement]] = {}
    versions: dict[str, str] = {}
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = BytesParser().parsebytes(archive.read(name))
        name = canonicalize_name(metadata["Name"])
        versions[name] = metadata["Version"]
        found[name] = [Requirement(words) for words in metadata.get_all("Requires-Dist") or ()]
    there = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    return [
        f"{name} needs {needed}"
        for name, needs in found.items()
        for needed in needs
        if needed.marker is None or needed.marker.evaluate(there)
        for other in (canonicalize_name(needed.name),)
        if not (needed.specifier.contains(versions[other]) if other in versions else other in THERE)
    ]


def _download(packages: Sequence[str], folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *packages], check=True)


def _wheels(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):  # two versions of one package stop an installation
        old.unlink()
    _download(WHEELS, folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."], check=True
    )
    if missing := missing_needs(folder):
        raise SystemExit(f"{missing[0]}, which neither travels nor is on the machine: add it to WHEELS or THERE")


def _flashinfer(target: Path, modules: dict[str, Path]) -> None:
    with tempfile.TemporaryDirectory() as where:
        _download((FLASHINFER,), Path(where))
        (wheel,) = Path(where).glob("flashinfer_python-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(where) / "unpacked")
        pack_flashinfer(Path(where) / "unpacked", modules, target)
    print(f"FlashInfer with {len(modules)} modules")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _tree() -> int:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return sum(Path(name).stat().st_size for name in listed.split("\0") if name and Path(name).is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--modules", type=Path, default=MODULES)
    where.add_argument("--without-modules", action="store_true", help="for a rehearsal on the pretended device")
    given = parser.parse_args()
    if shutil.which("git") is None:
        parser.error("git tells what the tree has: install it")
    wheels, packed, references = given.out / ".whl", given.out / ".fi", given.out / ".ref"
    modules = {} if given.without_modules else built_modules(given.modules)
    _wheels(wheels)
    _flashinfer(packed / "fi.tar.xz", modules)
    if not given.without_modules and not any(references.glob("*.npz")):
        command = [sys.executable, "-m", "benchmarks.gpu", str(references), "--stage", "references"]
        subprocess.run(command, check=True)
    check_size({"wheels": _size(wheels), "FlashInfer": _size(packed), "references": _size(references), "tree": _tree()})


if __name__ == "__main__":
    main()
