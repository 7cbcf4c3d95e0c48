"""llama.cpp's own HTTP server, of the wheel ``xllamacpp``: a program of the peer's environment.

python llama_worker.py MODEL.gguf PORT THREADS SLOTS CELLS
"""

from __future__ import annotations

import signal
import sys
import threading


def main() -> None:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    model, port, threads, slots, cells = sys.argv[1], *(int(word) for word in sys.argv[2:])
    given = xllamacpp.CommonParams()
    given.model.path = model
    given.hostnames, given.port = ["127.0.0.1"], port
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
    given.n_parallel, given.n_ctx, given.kv_unified = slots, cells, False
    given.n_threads_http = slots + 4
    server = xllamacpp.Server(given)
    print("listening at", server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Event().wait()


if __name__ == "__main__":
    main()
