"""The process of one rank: ``python -m fwk_executors.processes.child FD [placed]``, started by the executor.

FD is one end of a pair of sockets. It is also the leash: when the other end is closed, by whatever death, this
process ends at once. On another machine than the engine's, FD is a connection to the engine, and a ``Placement`` comes
on standard input, which then is a second leash, the node's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import sys
import threading
from pathlib import Path

import msgspec

from fwk.errors import FwkError
from fwk.interfaces.executor import Worker
from fwk_executors._common.answers import digest, failure
from fwk_executors._common.torch_group import Position, TorchGroup, World
from fwk_executors.processes.messages import (
    Call,
    Called,
    Frames,
    FromRank,
    Loaded,
    Placement,
    Ran,
    Run,
    Start,
    ToRank,
    encode,
    frame,
)
from fwk_process.parent import continue_with_parent_gone, ignore_terminal_signals

END_SECONDS = 1.5
"""What the worker may still finish once the engine is gone."""


class Child:
    """One rank's life."""

    def __init__(self, connection: socket.socket, placement: Placement | None = None) -> None:
        self._connection = connection
        self._placement = placement
        self._jobs: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self._folder: Path | None = None
        self._worker: Worker | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Serve until the other side is gone."""
        start = self._jobs.get()
        assert isinstance(start, Start)
        if isinstance(start.store, str):
            self._folder = Path(start.store).parent
        recipe = start.recipe or (self._placement.recipe if self._placement is not None else None)
        assert recipe is not None
        position = Position(start.rank, start.size, start.local_rank, start.local_size, start.num_stages)
        try:
            worker = self._worker = recipe.make(TorchGroup(World(position, start.store)))
            info = worker.load()
        except Exception as error:
            self._send(failure(start.number, error, is_refusal=isinstance(error, FwkError)))
        else:
            self._send(Loaded(start.number, info))
            gc.collect()
            gc.freeze()  # what is alive now stays; collections need not look at it again
            while self._serve(worker, self._jobs.get(), is_first=start.rank == start.size - position.stage_size):
                pass
        threading.Event().wait()  # of no more use; the leash ends it

    def _serve(self, worker: Worker, job: ToRank, *, is_first: bool) -> bool:
        """Do a job and answer; False when the worker can do no more. is_first: of the last stage's ranks."""
        try:
            if isinstance(job, Run):
                result = worker.execute(job.batch)
                self._send(Ran(job.number, digest(result), result if is_first else None))
            else:
                assert isinstance(job, Call)
                self._send(Called(job.number, worker.call(job.name, *job.arguments)))
        except Exception as error:
            is_refusal = isinstance(error, FwkError) and isinstance(job, Call)
            self._send(failure(job.number, error, is_refusal=is_refusal))
            return is_refusal
        return True

    def _send(self, message: FromRank) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the leash is about to end us
            seal = self._placement.sending if self._placement is not None else None
            self._connection.sendall(frame(encode(message), seal))

    def _read(self) -> None:
        """Take in messages as they come, so that the sender never waits for a step."""
        seal = self._placement.receiving if self._placement is not None else None
        frames: Frames[ToRank] = Frames(self._connection, ToRank, seal)
        while (messages := frames.receive()) is not None:
            for message in messages:
                self._jobs.put(message)
        end = threading.Timer(END_SECONDS, os._exit, (0,))
        end.daemon = True
        end.start()
        if self._folder is not None:  # still there if the engine was killed while we loaded
            with contextlib.suppress(OSError):
                for path in self._folder.iterdir():
                    path.unlink()
                self._folder.rmdir()
        if self._worker is not None:
            with contextlib.suppress(Exception):
                self._worker.close()
        os._exit(0)


def placed() -> Placement:
    """What the node says on standard input; when that ends later, the node has, and so does this process."""
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            os._exit(0)
        data += part

    def follow() -> None:
        while os.read(0, 1 << 16):
            pass
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    return msgspec.json.decode(data, type=Placement)


if __name__ == "__main__":
    ignore_terminal_signals()
    continue_with_parent_gone()
    Child(socket.socket(fileno=int(sys.argv[1])), placed() if sys.argv[2:] == ["placed"] else None).run()
