"""Speaks for an engine in an actor of a Ray cluster: ``python -m fwk_pools.ray.relay``, in an engine process's place.

It is the driver that Ray knows, so the actor ends when this process does, however it ends. Nothing is kept here: what
the server sends goes to the actor, what comes from there to the server. When the actor ends, or its node, this ends,
and core starts another in its place, for which Ray finds a node that lives.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from fwk.errors import EngineDead
from fwk.types import EngineFailed
from fwk_process.parent import continue_with_parent_gone, ignore_terminal_signals

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger("fwk.engine")

EXIT_FAILED, EXIT_NOT_STARTED = 70, 78
CONNECT_SECONDS = 10.0
SAY_SECONDS = 10.0
JOIN_SECONDS = 60.0
"""A cluster must have answered in, looked at between two tries of Ray, of half a minute each; it makes twenty."""
SHOWN = 300
"""Characters of Ray's own explanation in a message."""

NAME = "engine_pools.ray"


class Server:
    """The server's end: a socket that it connects to, and on which only it is listened to."""

    def __init__(self, address: str, client: str) -> None:
        self._address, self._client = address, client.encode()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self._has_met = False

    def receive(self) -> list[bytes]:
        """What has come; empty: a stranger's."""
        sender, *messages = self.socket.recv_multipart()
        if sender != self._client:
            log.warning("dropped a message that came from a stranger")
            return []
        if not self._has_met:  # no other process can connect from now on
            self._has_met = True
            Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)
        return messages

    def send(self, message: bytes) -> None:
        self.socket.send_multipart([self._client, message])

    def fail(self, text: str, exit_code: int | None = None) -> None:
        """Say why there is no engine; the server has sent something by now, or will once it is ready."""
        if self._has_met or self.socket.poll(30_000):
            if not self._has_met:
                self.receive()
            self.send(msgspec.msgpack.encode(EngineFailed(text, exit_code=exit_code)))

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def main() -> int:
    """The exit code tells what became of the engine."""
    ignore_terminal_signals()
    continue_with_parent_gone()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a wish for the engine's stack, which is not here
    spec = _told()
    level = spec["config"]["server"].get("log_level", "info").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    server = Server(spec["address"], spec["client"])
    try:
        return _run(server, spec)
    except EngineDead as error:
        server.fail(str(error), EXIT_NOT_STARTED)
        return EXIT_NOT_STARTED
    finally:
        server.close()


def _run(server: Server, spec: dict[str, Any]) -> int:
    options = spec["config"]["plugin_options"][NAME]
    check(spec["config"])
    import ray  # noqa: PLC0415 - it takes a second
    from ray.exceptions import RayError  # noqa: PLC0415

    _connect(ray, options.get("ray_engine_address", "auto"))
    actor = _placed(ray, options, spec)
    wire = Wire(ray, actor)
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    poller.register(wire.woken, zmq.POLLIN)
    try:
        while True:
            ready = dict(poller.poll())
            if server.socket in ready and (messages := server.receive()):
                wire.send(messages)
            if wire.woken.fileno() in ready:
                for message in wire.received():
                    server.send(message)
                if wire.exit_code is not None:
                    return _ended(server, wire.exit_code, wire.place)
                if wire.error is not None:
                    raise wire.error
    except RayError as error:
        server.fail(f"its actor {wire.place} {_how_ended(error)}")
        return EXIT_FAILED


HERE = {
    "features.media": ("enable_multimodal", "an engine reads images from files of the server's machine"),
    "features.remote_prefill": ("disaggregation_mode", "its workers' addresses would be the server's"),
}
"""Of plugins' options, those that need the engine on the server's machine, and why."""


def check(config: Mapping[str, Any]) -> None:
    """Raise ``EngineDead`` for what an engine elsewhere cannot do."""
    if config["engine"]["executor"] == "ray":
        raise EngineDead(
            "--data-parallel-backend ray puts engines into actors and --executor ray their ranks: with the latter "
            "alone, each engine of --data-parallel-size has its ranks on the cluster already"
        )
    for key, (option, why) in HERE.items():
        if config["plugin_options"].get(key, {}).get(option):
            raise EngineDead(f"--data-parallel-backend ray is not possible with --{option.replace('_', '-')}: {why}")


def _ended(server: Server, code: int, place: str) -> int:
    """The engine has ended, and has said why unless it was killed."""
    if code >= 0:
        return code
    server.fail(f"its process {place} was killed by signal {-code} ({signal.Signals(-code).name})")
    return EXIT_FAILED


class Wire:
    """The way to the actor and back. Ray's answers are waited for in a thread, which wakes the one that has sockets."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.place = _place(*ray.get(actor.place.remote()))
        self.exit_code: int | None = None
        self.error: Any = None
        self._came: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sent: ObjectRef[None] | None = None
        self.woken, self._wake = socket.socketpair()
        self.woken.setblocking(False)
        threading.Thread(target=self._follow, daemon=True).start()

    def send(self, messages: list[bytes]) -> None:
        self._sent = self._actor.send.remote(messages)  # one that is lost is seen by who waits for answers

    def received(self) -> list[bytes]:
        """What has come since."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
        found: list[bytes] = []
        while not self._came.empty():
            found.append(self._came.get())
        return found

    def _follow(self) -> None:
        try:
            while self.exit_code is None:
                frames, self.exit_code = self._ray.get(self._actor.receive.remote())
                for frame in frames:
                    self._came.put(frame)
                self._wake.send(b"!")
        except Exception as error:  # of Ray's, whose classes are many
            self.error = error
            self._wake.send(b"!")


def _told() -> dict[str, Any]:
    """The spec, a line on standard input; this process ends when that is closed."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            sys.exit(1)
        line += part
    spec = json.loads(line)

    def follow() -> None:
        while os.read(0, 1 << 16):
            pass
        path = Path(spec["address"].removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    return spec


def _connect(ray: Any, address: str) -> None:
    found = address if address != "auto" else os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = found.rpartition(":")
    if found == "auto":
        _probe(_remembered(ray), ", where Ray knows one of this machine (--ray-engine-address auto)")
    elif host and port.isdecimal():
        _probe(found)
    else:
        raise EngineDead(f"--ray-engine-address {found}: must be HOST:PORT, such as 10.0.0.1:6379, or auto")
    kept = signal.getsignal(signal.SIGTERM)
    try:
        with _waiting(f"the Ray cluster at {found}" if found != "auto" else "the Ray cluster on this machine"):
            ray.init(address=found, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises that class itself where it waited in vain
        raise EngineDead(
            f"no Ray cluster can be joined: {_first_line(error)}; run `ray start --head` on one machine, "
            "`ray start --address HEAD:6379` on others, and fwk on one of them"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, kept)


def _probe(address: str, which: str = "") -> None:
    """Raise ``EngineDead`` where nothing listens, or nothing is known to: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise EngineDead(
            f"no Ray cluster can be joined at {address}{which}: {error.strerror or error}; start one (`ray stop`, then "
            "`ray start --head`), or give the address of one that runs (--ray-engine-address HOST:PORT)"
        ) from None


def _remembered(ray: Any) -> str:
    """The cluster that Ray would join, also one that was killed; empty: none, or this Ray does not say."""
    try:
        return ray._private.services.canonicalize_bootstrap_address("auto") or ""
    except (AttributeError, ConnectionError, ValueError):
        return ""


class _Late(BaseException):
    """Not caught where Ray tries again whatever was raised."""


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Say what is waited for, and again while it lasts. Raises ``TimeoutError`` after ``JOIN_SECONDS``."""
    done, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(SAY_SECONDS):
            log.info("waiting for %s to answer, for %.0f seconds so far", what, time.monotonic() - begun)

    def give_up(*_: object) -> None:
        raise _Late

    log.info("joining %s", what)
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    kept = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, JOIN_SECONDS)
        yield
    except _Late:
        raise TimeoutError(f"{what} has not answered for {JOIN_SECONDS:g} seconds") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)
        done.set()
        thread.join()


def _placed(ray: Any, options: dict[str, Any], spec: dict[str, Any]) -> Any:
    """The actor, with the engine's process started."""
    from fwk_pools.ray.actor import EngineActor  # noqa: PLC0415
    from ray.exceptions import GetTimeoutError, RayError  # noqa: PLC0415

    cpus, gpus = options.get("ray_engine_cpus", 1), options.get("ray_engine_gpus", 0)
    resources = options.get("ray_engine_resources") or {}
    # SPREAD: on the node with the fewest, so that one that dies takes few. max_restarts: core starts another.
    actor = (
        ray.remote(EngineActor)
        .options(num_cpus=cpus, num_gpus=gpus, resources=resources, max_restarts=0, scheduling_strategy="SPREAD")
        .remote()
    )
    asked, timeout, begun = actor.place.remote(), options.get("ray_engine_timeout", 600.0), time.monotonic()
    amounts = {"CPU": cpus, "GPU": gpus, **resources}
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)
    while not ray.wait([asked], timeout=min(SAY_SECONDS, timeout))[0]:
        if time.monotonic() - begun > timeout:
            raise EngineDead(f"Ray has no place for an engine that needs {wanted} (--ray-engine-timeout {timeout:g})")
        log.info("waiting for Ray to have a place for an engine that needs %s", wanted)
    place = ""
    try:
        place = _place(*ray.get(asked))
        if gpus:
            spec["engine_index"] = 0  # it sees those GPUs alone that Ray has reserved
        threads = {"OMP_NUM_THREADS": str(cpus)}
        ray.get(actor.start.remote(_at_home(ray, spec, cpus), threads), timeout=timeout)
    except GetTimeoutError:
        raise EngineDead(f"the actor {place} does not start its engine") from None
    except RayError as error:
        raise EngineDead(f"the actor of an engine {_how_ended(error)}") from None
    log.info("Ray has put engine %d into %s", spec["engine_index"], place)
    return actor


def _at_home(ray: Any, spec: dict[str, Any], cpus: int) -> dict[str, Any]:
    """The spec with as many engines as may share a node's memory, not as many as there are."""
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    given = spec["config"]["plugin_options"].get("engine_pools.replicas", {})
    if "data_parallel_size" in given:
        given["data_parallel_size"] = max(1, min(int(given["data_parallel_size"]), int(most // cpus)))
    return spec


def _place(address: str, pid: int) -> str:
    return f"(pid {pid} on node {address})"


def _how_ended(error: BaseException) -> str:
    text = str(error)
    if type(error).__name__ == "ActorDiedError":
        return "has ended with its node" if "node has died" in text else "has ended"
    return f"is gone: {_first_line(error)[:SHOWN]}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
