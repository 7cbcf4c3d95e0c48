"""Processes and servers that encode media: pieces of all requests wait in one queue, and what is encoded is kept."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from fwk.errors import ConfigError, NotServed, RequestFailed
from fwk.interfaces.executor import WorkerRecipe
from fwk.interfaces.multimodal import Media
from fwk.interfaces.parallel import threads_each
from fwk_multimodal.media import MediaOptions
from fwk_multimodal.media.encoder_servers import EncoderServer
from fwk_multimodal.media.encoding_messages import Answer, Encode, Start, framed, size_of
from fwk_multimodal.media.placing import PayloadFile
from fwk_process.folders import TemporaryFolder
from fwk_process.parent import terminal_signals_blocked

log = logging.getLogger(__name__)

ENCODE_SECONDS = 300.0
"""What a process may take for the pieces that it was given at once; then it counts as hung."""

MAX_DEATHS = 2
"""Processes that a piece may take with it, the second one alone."""

MAX_PAUSE = 30.0
"""Seconds between two tries to start a process, at most; the first pause is one second."""


@dataclass(eq=False, slots=True)
class Piece:
    """What is encoded at once. done: set to why it was not, or None.

    payload: holds the piece's file, as long as it waits. turn: pieces go by it, then as they came.
    """

    item: Media
    payload: Any
    file: PayloadFile
    turn: float
    number: int
    done: asyncio.Future[Exception | None]
    num_waiting: int = 0
    num_deaths: int = 0
    is_alone: bool = False

    def __lt__(self, other: Piece) -> bool:
        return (self.turn, self.number) < (other.turn, other.number)


class PieceQueue:
    """Pieces of all requests. Of two requests each has its turn, however many pieces the one that came first has.

    drop: called with those whose request has ended when their turn comes.
    """

    def __init__(self, drop: Callable[[Piece], None]) -> None:
        self._drop = drop
        self._heap: list[Piece] = []
        self._turn = 0.0  # of the newest piece that was taken
        self._arrived = asyncio.Event()

    def put(self, piece: Piece, place: int = 0) -> None:
        """place: of the piece among those of its request."""
        piece.turn = self._turn + place
        heapq.heappush(self._heap, piece)
        self._arrived.set()

    async def take(self, most: int) -> list[Piece]:
        """Wait for pieces of one kind."""
        while True:
            taken: list[Piece] = []
            while self._heap and len(taken) < most:
                piece = self._heap[0]
                if piece.num_waiting and taken and (piece.is_alone or piece.item.kind != taken[0].item.kind):
                    break
                heapq.heappop(self._heap)
                if not piece.num_waiting:
                    self._drop(piece)
                    continue
                taken.append(piece)
                self._turn = max(self._turn, piece.turn)
                if piece.is_alone:
                    break
            if taken:
                return taken
            self._arrived.clear()
            await self._arrived.wait()

    def clear(self) -> list[Piece]:
        """All that wait."""
        found, self._heap = self._heap, []
        return found


class EncodedFiles:
    """Files of rows by the key of what they are of; those used least recently go first beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[bytes, tuple[PayloadFile, int]] = OrderedDict()
        self._num_bytes = 0
        self._folder = TemporaryFolder("rows")  # of clients' images
        self._numbers = itertools.count()

    def new(self) -> PayloadFile:
        return PayloadFile(self._folder.path / f"{next(self._numbers)}.npz")

    def get(self, key: bytes) -> PayloadFile | None:
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def put(self, key: bytes, file: PayloadFile) -> None:
        """Keep it, unless it alone is too large."""
        size = file.path.stat().st_size
        if key in self._found or size > self._max_bytes:
            return
        self._found[key] = file, size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._found.popitem(last=False)[1][1]

    def close(self) -> None:
        self._found.clear()
        self._folder.close()


class EncoderProcess:
    """One process."""

    def __init__(self, index: int, threads: int) -> None:
        self._asking = threading.Lock()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        with terminal_signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fwk_multimodal.media.encoder_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
            )
        self.name = f"encoder {index} (pid {self._process.pid})"

    def ask(self, message: msgspec.Struct) -> Answer:
        """Raises ``EOFError`` where the process ends meanwhile."""
        assert self._process.stdin is not None
        try:
            with self._asking:
                data = memoryview(framed(message))
                while data:
                    data = data[os.write(self._process.stdin.fileno(), data) :]
                return msgspec.json.decode(self._read(size_of(self._read(4))), type=Answer)
        except (OSError, ValueError):
            raise EOFError from None

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = b""
        while len(data) < count:
            part = os.read(self._process.stdout.fileno(), count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Kill it where it lives, and say how it ended."""
        self._process.kill()
        code = self._process.wait()
        with self._asking:  # whose pipes they are
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Encoder(Protocol):
    """What a pool has encode: a process, or another server."""

    name: str

    def ask(self, message: msgspec.Struct) -> Answer:
        """Blocks. Raises ``EOFError`` where it ends meanwhile."""
        ...

    def kill(self) -> None:
        """End it, and with it what is asked, from any thread."""
        ...

    def end(self) -> str:
        """Kill it where it lives, and say how it ended."""
        ...


class EncoderPool:
    """``run`` starts encoders and keeps them alive until it is cancelled. On the server's event loop.

    make: makes the ``i``-th of ``count``, and the first message for it. lost: the error of a piece, by its kind, with
    which ``max_deaths`` encoders have ended, and how the last one did. must_start: whether the server's start fails
    with one that ends before it has loaded, as it does with one that refuses.
    """

    def __init__(
        self,
        options: MediaOptions,
        make: Callable[[int], tuple[Encoder, msgspec.Struct]],
        count: int,
        lost: Callable[[str, str], Exception],
        max_deaths: int = MAX_DEATHS,
        *,
        must_start: bool = True,
    ) -> None:
        self.options = options
        self.files = EncodedFiles(options.mm_encoder_cache_bytes)
        self.encoders: dict[int, Encoder] = {}
        self._make = make
        self._error_of = lost
        self._max_deaths = max_deaths
        self._must_start = must_start
        self._queue = PieceQueue(self._drop)
        self._known: dict[bytes, Piece] = {}  # by key, of those that wait or are encoded
        self._down: dict[int, str] = {}  # by index, why one cannot be used
        self._refused: set[int] = set()  # of those, which have said so themselves
        self._numbers = itertools.count()
        self._loaded = [asyncio.Event() for _ in range(count)]
        self._threads = ThreadPoolExecutor(2 * count, "fwk-encoders")  # to ask each, and to end it

    # What the server asks.

    async def encode(self, media: Sequence[Media], payload: Any) -> list[PayloadFile]:
        """Files of the pieces' rows. payload: holds what these are made of.

        Raises ``RequestFailed``, and ``NotServed`` while nothing encodes.
        """
        found: dict[bytes, PayloadFile] = {}
        waiting: dict[bytes, Piece] = {}
        for item in media:
            known = self.files.get(item.key)
            if known is not None:
                found[item.key] = known
            elif item.key not in waiting:
                waiting[item.key] = self._piece(item, payload, len(waiting))
        try:
            if waiting:
                await asyncio.wait([piece.done for piece in waiting.values()])
        finally:
            for piece in waiting.values():
                piece.num_waiting -= 1
        for key, piece in waiting.items():
            error = piece.done.result()
            if error is not None:
                raise error
            found[key] = piece.file
        return [found[item.key] for item in media]

    def _piece(self, item: Media, payload: Any, place: int) -> Piece:
        """One that waits already, or a new one."""
        piece = self._known.get(item.key)
        if piece is not None:
            piece.num_waiting += 1
            return piece
        done = asyncio.get_running_loop().create_future()
        piece = Piece(item, payload, self.files.new(), 0.0, next(self._numbers), done, num_waiting=1)
        self._known[item.key] = piece
        if len(self._down) < len(self._loaded):
            self._queue.put(piece, place)
        else:
            self._finish(piece, self._none_lives())
        return piece

    def _finish(self, piece: Piece, error: Exception | None) -> None:
        self._drop(piece, error)
        if error is None:
            self.files.put(piece.item.key, piece.file)

    def _drop(self, piece: Piece, error: Exception | None = None) -> None:
        del self._known[piece.item.key]
        piece.done.set_result(error)

    def _none_lives(self) -> NotServed:
        return NotServed(f"nothing encodes this request's media now: {self.trouble()}", 503, 1)

    def trouble(self) -> str | None:
        """Which encoders cannot be used."""
        return "; ".join(dict.fromkeys(why for _, why in sorted(self._down.items()))) or None

    # The encoders.

    async def ready(self) -> None:
        """All have loaded, or cannot. Raises ``ConfigError`` where one must."""
        for index, loaded in enumerate(self._loaded):
            await loaded.wait()
            if index in self._down and (self._must_start or index in self._refused):
                raise ConfigError(f"an encoder cannot be used: {self._down[index]}")

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._loaded)):
                    group.create_task(self._keep(index))
        finally:
            for encoder in self.encoders.values():
                encoder.kill()
            for piece in list(self._known.values()):
                self._drop(piece, NotServed("the server is stopping", 503))
            self._threads.shutdown()
            for encoder in self.encoders.values():
                encoder.end()
            self.files.close()

    async def _keep(self, index: int) -> None:
        """Make an encoder, and another one when it has ended."""
        pause = 1.0
        while True:
            encoder, start = self._make(index)
            self.encoders[index] = encoder
            why = await self._loads(index, encoder, start)
            if why is None:
                self._down.pop(index, None)
                self._loaded[index].set()
                log.info("%s serves", encoder.name)
                why, pause = await self._serve(encoder), 1.0
                log.error("%s %s; it is tried again", encoder.name, why)
            else:
                self._give_up(index, why)
                log.error("%s", why)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)

    async def _loads(self, index: int, encoder: Encoder, start: msgspec.Struct) -> str | None:
        """Why it has not; None: it has loaded."""
        self._refused.discard(index)
        try:
            why = (await self._ask(encoder, start)).error
        except EOFError:
            return f"{encoder.name} {await self._end(encoder)}"
        if why:
            self._refused.add(index)
            await self._end(encoder)
        return f"{encoder.name}: {why}" if why else None

    def _give_up(self, index: int, why: str) -> None:
        self._down[index] = why
        self._loaded[index].set()
        if len(self._down) == len(self._loaded):
            for piece in self._queue.clear():
                self._finish(piece, self._none_lives())

    async def _serve(self, encoder: Encoder) -> str:
        """Give it pieces until it ends; how it did."""
        while (how := await self._serve_batch(encoder)) is None:
            pass
        return how

    async def _serve_batch(self, encoder: Encoder) -> str | None:
        """Wait for pieces and have them encoded; how the process has ended, if so."""
        pieces = await self._queue.take(self.options.mm_encoder_batch_size)
        told = [(p.item.payload, p.item.index, p.item.length, str(p.file.path)) for p in pieces]
        try:
            async with asyncio.timeout(ENCODE_SECONDS):
                answer = await self._ask(encoder, Encode(pieces[0].item.kind, told))
        except (EOFError, TimeoutError) as error:
            how = await self._end(encoder)
            if isinstance(error, TimeoutError):
                how = f"took more than {ENCODE_SECONDS:g} seconds for {len(pieces)} pieces, and was ended"
            self._lost(pieces, how)
            return how
        for piece in pieces:
            if answer.error and len(pieces) > 1:  # it may be another's fault
                piece.is_alone = True
                self._queue.put(piece)
            else:
                self._finish(piece, RequestFailed(f"encoding failed: {answer.error}") if answer.error else None)
        return None

    def _lost(self, pieces: Sequence[Piece], how: str) -> None:
        """The process that had these has ended: each has another try, alone."""
        for piece in pieces:
            piece.num_deaths += 1
            piece.is_alone = True
            if piece.num_deaths < self._max_deaths:
                self._queue.put(piece)
            else:
                self._finish(piece, self._error_of(piece.item.kind, how))

    async def _ask(self, encoder: Encoder, message: msgspec.Struct) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, encoder.ask, message)

    async def _end(self, encoder: Encoder) -> str:
        encoder.kill()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encoder.end)


def local_pool(
    recipe: Callable[[int, int], WorkerRecipe], feature: str, options: MediaOptions, count: int
) -> EncoderPool:
    """Processes of this server. recipe: of a worker, by its device and its threads. feature: whose part encodes."""
    threads = options.mm_encoder_threads or threads_each(count + 1, os.environ)
    devices = options.mm_encoder_devices or (0,)

    def make(index: int) -> tuple[Encoder, msgspec.Struct]:
        start = Start(recipe(devices[index % len(devices)], threads), feature, options.mm_encoder_niceness)
        return EncoderProcess(index, threads), start

    def lost(kind: str, how: str) -> Exception:
        return RequestFailed(f"the processes that encoded this request's {kind} ended: one {how}")

    return EncoderPool(options, make, count, lost)


def remote_pool(options: MediaOptions, secret: bytes, identity: str) -> EncoderPool:
    """Other servers, each of which is asked for two batches at a time."""
    urls = [url.rstrip("/") for url in options.encoder_servers]

    def make(index: int) -> tuple[Encoder, msgspec.Struct]:
        return EncoderServer(urls[index % len(urls)], secret, identity), Encode("", [])

    def lost(kind: str, how: str) -> Exception:
        return NotServed(f"no encoder server encodes this request's {kind}: one {how}", 503, 1)

    return EncoderPool(options, make, 2 * len(urls), lost, 2 * len(urls), must_start=False)
