"""What the workers share: lines of JSON in, lines of JSON out. Runs in the peers' environments, without fwk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(open_engine: Callable[[], Callable[[int, list[dict[str, Any]]], dict[str, Any]]]) -> None:
    """Open the engine, say so, and run each load that comes in.

    A load has ``concurrency`` and ``requests`` (``prompt``: token ids, ``num_output``, ``schema``: JSON or None); its
    answer ``seconds`` and for each request ``sent``, ``times`` and ``token_ids``.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print goes to the log
        run = open_engine()
        print("{}", file=out, flush=True)
        for line in sys.stdin:
            load = json.loads(line)
            print(json.dumps(run(load["concurrency"], load["requests"])), file=out, flush=True)
