"""Snapshots of hub repositories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import ModelSource, Progress
from fwk_http.clients import Allowance, bound_httpx
from fwk_process.progress import is_watched

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "tiktoken.model")
IGNORED = ("original/*", "consolidated*", "onnx/*", "*/*.safetensors")
"""Second copies of the weights in other layouts."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Of what the hub says of a repository, and of any reply that does not say its own length."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(rf"({_PART}/{_PART})(?::([A-Za-z0-9._-]{{1,64}}))?")
_REMEDIES = {
    "GatedRepoError": "accept the model's terms on the hub and log in (hf auth login, or HF_TOKEN)",
    "RepositoryNotFoundError": "check the name; a private model needs HF_TOKEN",
    "RevisionNotFoundError": "check --revision",
    "HFValidationError": "check the name",
}


class HubSource(ModelSource):
    """Answers for names with exactly one slash. ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and ``HF_ENDPOINT`` are honoured."""

    def fetch(self, name: str, revision: str | None, download_dir: Path, progress: Progress) -> Path | None:
        """The folder of the snapshot, or the GGUF file of the tag. Never fetches pickles or code."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        repository, tag = match[1], match[2]
        progress(f"looking for {repository} on the hub; it is kept in {download_dir / 'hub'}")
        patterns = [f"*{tag}*.gguf", f"*{tag}*.GGUF"] if tag else list(PATTERNS)
        folder = _snapshot(
            name,
            download_dir / "hub",
            {
                "repo_id": repository,
                "revision": revision,
                "allow_patterns": patterns,
                "ignore_patterns": None if tag else list(IGNORED),
            },
        )
        return _gguf(name, folder, tag) if tag else folder


def _snapshot(name: str, cache_dir: Path, wanted: dict[str, Any]) -> Path:
    try:
        import huggingface_hub  # noqa: PLC0415 - slow to import
        from huggingface_hub.utils import _http, disable_progress_bars  # noqa: PLC0415 - slow to import
    except ImportError as error:
        raise ModelLoadError(
            f"model {name!r}: needs the package huggingface_hub: pip install huggingface_hub"
        ) from error
    if not is_watched():
        disable_progress_bars()  # a log file is no place for them
    default: Any = _http.default_client_factory
    huggingface_hub.set_client_factory(lambda: bound_httpx(default(), _allowance, follows_redirects=True))
    try:
        return Path(huggingface_hub.snapshot_download(**wanted, cache_dir=cache_dir))
    except Exception as error:  # HTTP, sockets, disk and validation, each with its own classes
        kind = type(error).__name__
        found = None if kind in _REMEDIES else _fetched_by_others(wanted)
        if found is not None:
            return found
        remedy = _REMEDIES.get(kind, "check the network (HF_ENDPOINT, HF_HUB_OFFLINE)")
        detail = " ".join(str(error).split())[:400]
        raise ModelLoadError(
            f"model {name!r} could not be fetched from the hub: {kind}: {detail}. What to do: {remedy}; or put the "
            "model on this machine and give its path: fwk serve PATH"
        ) from error


def _allowance(reply: Any) -> Allowance:
    """A file may be as large as it says; it is written to the disk, not kept in memory."""
    length = reply.headers.get("content-length", "")
    is_file = length.isdecimal() and not reply.request.url.path.startswith("/api/")
    return Allowance(int(length) if is_file else MAX_ANSWER_BYTES)


def _fetched_by_others(wanted: dict[str, Any]) -> Path | None:
    """The snapshot in the hub library's own cache, where other programs keep theirs. No network call."""
    import huggingface_hub  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415 - slow to import

    try:
        return Path(huggingface_hub.snapshot_download(**wanted, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _gguf(name: str, folder: Path, tag: str) -> Path:
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() == ".gguf" and tag in file.name)
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ModelLoadError(f"model {name!r}: the tag must fit exactly one .gguf file; it fits: {names}")
    return found[0]
