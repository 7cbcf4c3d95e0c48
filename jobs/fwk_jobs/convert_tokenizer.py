"""A program of its own: a tokenizer.json made of a folder's vocabulary file, by transformers' converters.

``python -P convert_tokenizer.py FOLDER RESULT CPU_SECONDS MEGABYTES``. It ends with exit code 0, or with 1 and a
sentence, or by a signal. Nothing of the folder is executed, and torch is not imported.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert."""
    folder, result, seconds, megabytes = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(megabytes) << 20, int(megabytes) << 20))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    sys.modules["torch"] = None  # type: ignore[assignment] - takes a second to import and is not needed
    loader: Any = importlib.import_module("transformers").AutoTokenizer
    made = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backend = getattr(made, "backend_tokenizer", None)
    if backend is None:
        sys.exit(f"transformers reads it with {type(made).__name__}, which has no form of the fast library's")
    Path(result).write_text(backend.to_str(), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        sys.exit("it takes too much memory")
    except BaseException as error:  # libraries raise all kinds; ``SystemExit`` holds a sentence already
        if isinstance(error, SystemExit):
            raise
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
