"""A process that encodes: ``python -m fwk_multimodal.media.encoder_process``, started by ``encoders``.

Messages come on standard input, each with its length before it, and answers go to what was standard output. The input
is also the leash: when it ends, by whatever death of the server, this process ends at once.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import Any

import msgspec

from fwk.errors import FwkError, one_line_traceback
from fwk.interfaces.executor import Worker
from fwk.interfaces.parallel import SingleRank
from fwk_multimodal.media.encoding_messages import Answer, Encode, Start, framed, size_of
from fwk_process.oom import prefer_as_victim
from fwk_process.parent import continue_with_parent_gone, ignore_terminal_signals


def _read(count: int) -> bytes:
    """So many bytes of the input; the process ends where it does."""
    parts: list[bytes] = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _read_all(messages: queue.SimpleQueue[bytes]) -> None:
    while True:
        messages.put(_read(size_of(_read(4))))


def _answer(target: int, answer: Answer) -> None:
    data = memoryview(framed(answer))
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        os._exit(0)  # its reader has ended


def _done(target: int, work: Any, *args: Any) -> Any:
    """Run it and answer; what it returned, None where it raised."""
    try:
        made = work(*args)
    except FwkError as error:
        _answer(target, Answer(str(error)))
    except MemoryError:
        _answer(target, Answer("it takes more memory than there is"))
    except Exception as error:
        is_memory = type(error).__name__ == "OutOfMemoryError"
        why = "it takes more memory than the device has" if is_memory else f"{type(error).__name__} was raised"
        sys.stderr.write(f"{one_line_traceback(error)}\n")
        _answer(target, Answer(why))
    else:
        _answer(target, Answer())
        return made
    return None


def main() -> None:
    """Serve until the input ends."""
    ignore_terminal_signals()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a whole group: the server ends it when nothing is under way
    continue_with_parent_gone()
    prefer_as_victim()
    target = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    start = msgspec.json.decode(_read(size_of(_read(4))), type=Start)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(messages,), daemon=True).start()
    os.nice(start.niceness)

    def load() -> Worker:
        worker = start.recipe.make(SingleRank())
        worker.load()
        return worker

    worker = _done(target, load)
    while worker is not None:
        work = msgspec.json.decode(messages.get(), type=Encode)
        _done(target, worker.call, f"features.{start.feature}.encode", work.kind, work.pieces)
    threading.Event().wait()  # of no more use: the end of the input ends it


if __name__ == "__main__":
    main()
