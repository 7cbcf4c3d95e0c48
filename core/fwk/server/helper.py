"""The server's helper process, from its side: what may turn out endless or huge is tried there first."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec

from fwk.config import Config
from fwk.config.wire import to_plain
from fwk.errors import InvalidRequest, NotServed, PluginFault, RequestFailed
from fwk.interfaces.feature import Jobs
from fwk_jobs.client import MAX_WAITING, JobError, JobProcess, current_work

log = logging.getLogger(__name__)


class HelperSetup(msgspec.Struct, frozen=True):
    """What the server settled on."""

    config: dict[str, Any]


def new_helper(config: Config) -> JobProcess:
    """Not started yet."""
    return JobProcess("fwk.server.helper_process", HelperSetup(to_plain(config)))


class HelperJobs(Jobs):
    """Jobs of a feature."""

    def __init__(self, helper: JobProcess, feature: str) -> None:
        self._helper = helper
        self._kind = feature_kind(feature)

    def run(self, body: bytes, what: str, *, cpu_seconds: float, max_bytes: int, is_bounded: bool = True) -> bytes:
        most = MAX_WAITING if is_bounded else None
        try:
            return self._helper.call(self._kind, body, cpu_seconds=cpu_seconds, max_bytes=max_bytes, max_waiting=most)
        except JobError as error:
            raise _told(error, what, cpu_seconds, max_bytes) from None

    def warm_up(self, body: bytes = b"") -> None:
        with contextlib.suppress(JobError):
            self._helper.warm_up(self._kind, body)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        work = current_work.get()
        return contextlib.nullcontext() if work is None else work.waiting(lambda: None)


def feature_kind(name: str) -> str:
    """What jobs of a feature are called among the kinds."""
    return f"features.{name}"


def _told(error: JobError, what: str, cpu_seconds: float, max_bytes: int) -> Exception:
    """An error as the client is told: ``what`` was done with its part of the request."""
    match error.status:
        case "refused":
            return InvalidRequest(str(error), error.param)
        case "cpu":
            return InvalidRequest(f"{what} takes more than {cpu_seconds:g} seconds of CPU time")
        case "memory":
            return InvalidRequest(f"{what} takes more than {max_bytes >> 20} MB of memory")
        case "raised" if not str(error).startswith(PluginFault.__name__):  # what it was given is to blame
            log.warning("%s failed: %s", what, error)
            return InvalidRequest(f"{what} failed: what was given cannot be read")
        case "busy":
            return NotServed(f"too many requests wait for {what}", 503, 1)
        case "closed":
            return NotServed("the server is stopping", 503)
    kind, _, why = str(error).partition(": ")
    return RequestFailed(f"{what} failed: {why}" if kind == PluginFault.__name__ else f"{what} failed")
