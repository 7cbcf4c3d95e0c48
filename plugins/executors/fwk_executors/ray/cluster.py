"""The Ray cluster that this process is a driver of."""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from fwk.errors import ConfigError
from ray.exceptions import ActorDiedError, RayError

log = logging.getLogger("fwk.engine")

CONNECT_SECONDS, SAY_SECONDS = 10.0, 10.0
JOIN_SECONDS = 60.0
"""A cluster must have answered in, looked at between two tries of Ray, of half a minute each; it makes twenty."""

OBJECT_STORE_BYTES = 128 * 2**20
"""Of a Ray that is started here: what ranks exchange is small, and tensors go by collectives."""

SHOWN = 300
"""Characters of Ray's own explanation in a message."""


class _Connection:
    """What executors of this process share. users: those of a connection that one of them made."""

    users = 0


OF_A_NEW_ONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment of a Ray that is started here: it sends no usage statistics, and starts no process that is not a rank."""


def connect(address: str | None, num_cpus: int) -> bool:
    """Join a cluster, or start one of this machine alone where none is to be found; ``leave`` if this returns True.

    False: the process was in a cluster before any executor, and stays. Raises ``ConfigError``.

    address: HOST:PORT of a head, which must run; ``local``: start one; None: RAY_ADDRESS, the one on this machine, or
    a new one. num_cpus: the least that a new one has to offer, whatever this machine has.
    """
    if not ray.is_initialized():
        found = address or os.environ.get("RAY_ADDRESS")
        if found not in (None, "auto", "local"):
            _check_form(found)
            _probe(found)
        elif found != "local" and (remembered := _remembered()):
            try:
                _probe(remembered, ", where Ray knows one of this machine")
            except ConfigError as error:
                if found is not None:
                    raise
                log.warning("%s", error)
                found = "local"
        with _handler_kept():
            _init(found, num_cpus)
    elif not _Connection.users:
        return False
    _Connection.users += 1
    return True


def leave() -> None:
    """Undo one ``connect``: the last one ends the connection, and a Ray that was started for it."""
    _Connection.users -= 1
    if not _Connection.users:
        ray.shutdown()


def _init(address: str | None, num_cpus: int) -> None:
    try:
        if address != "local":
            try:
                with _waiting("this machine's Ray cluster" if address in (None, "auto") else f"Ray at {address}"):
                    ray.init(address=address or "auto", logging_level=logging.ERROR)
                return
            except ConnectionError:
                if address is not None:
                    raise
        log.info("starting a Ray of this machine alone")
        for name, value in OF_A_NEW_ONE.items():
            os.environ.setdefault(name, value)
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises that class itself where its start takes more than half a minute
        done = f"joined at {address}" if address not in (None, "local") else "started here"
        raise ConfigError(
            f"no Ray cluster can be {done}: {_first_line(error)}; run `ray start --head` on one machine, "
            "`ray start --address HEAD:6379` on others, and fwk on one of them"
        ) from None


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; how fwk ends is fwk's matter."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, kept)


def _check_form(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--ray-address {address}: must be HOST:PORT, such as 10.0.0.1:6379")


def _probe(address: str, which: str = "") -> None:
    """Raise ``ConfigError`` where nothing listens: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster can be joined at {address}{which}: {error.strerror or error}; start one there "
            f"(`ray stop`, then `ray start --head --port {port}`), or give another --ray-address"
        ) from None


def _remembered() -> str:
    """The cluster that Ray would join, HOST:PORT, also one that was killed; empty: none, or this Ray does not say."""
    try:
        found = ray._private.services.canonicalize_bootstrap_address("auto") or ""
        _check_form(found)
    except (AttributeError, ConnectionError, ValueError, ConfigError):
        return ""
    return found


class _Late(BaseException):
    """Not caught where Ray tries again whatever was raised."""


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Say what is waited for, and again while it lasts.

    Raises ``TimeoutError`` after ``JOIN_SECONDS`` in a main thread whose program has no alarm of its own; in others
    Ray's own end is waited for.
    """
    done, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(SAY_SECONDS):
            log.info("waiting for %s to answer, for %.0f seconds so far", what, time.monotonic() - begun)

    def give_up(*_: object) -> None:
        raise _Late

    log.info("joining %s", what)
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    is_bounded = threading.current_thread() is threading.main_thread() and not signal.getitimer(signal.ITIMER_REAL)[0]
    kept = signal.signal(signal.SIGALRM, give_up) if is_bounded else None
    try:
        if is_bounded:
            signal.setitimer(signal.ITIMER_REAL, JOIN_SECONDS)
        yield
    except _Late:
        raise TimeoutError(f"{what} has not answered for {JOIN_SECONDS:g} seconds") from None
    finally:
        if is_bounded:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, kept)
        done.set()
        thread.join()


def addresses() -> dict[str, str]:
    """Of each node, as others reach it, by the node's id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def resources_in_words(resources: Mapping[str, float]) -> str:
    """Without those that Ray makes up for each node."""
    shown = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(("node:", "object_store_")) and "_group_" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items()) if name != "memory") or "nothing"


def how_ended(error: RayError) -> str:
    """What has become of an actor that does not answer, as far as Ray knows: not by which signal it was killed."""
    if isinstance(error, ActorDiedError):
        return "has ended with its node" if "node has died" in str(error) else "has ended"
    return f"is gone: {_first_line(error)[:SHOWN]}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
