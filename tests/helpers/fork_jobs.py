"""A helper process for tests: ``python -m tests.helpers.fork_jobs``; its jobs misbehave as they are told."""

from __future__ import annotations

import os
import time

from fwk.errors import InvalidRequest
from fwk_jobs.fork_server import ForkServer
from fwk_jobs.frames import Job

prepared: list[Job] = []


def run(job: Job) -> bytes:
    """What ``job.kind`` says."""
    match job.kind:
        case "large":
            return bytes(4 << 20)
        case "spin":
            while True:
                sum(range(1000))
        case "allocate":
            return bytes(1 << 30)
        case "abort":
            os.write(2, b"memory allocation of 28672 bytes failed\n")
            os.abort()
        case "sleep":
            time.sleep(600)
        case "refuse" | "raise":
            raise InvalidRequest("not that one", "field") if job.kind == "refuse" else KeyError(job.kind)
        case "prepared":
            return str(len(prepared)).encode()
        case "die":
            os._exit(3)
    return job.body[::-1]


if __name__ == "__main__":
    os.read(0, len(b"null\n"))
    target = os.dup(1)
    os.dup2(2, 1)
    ForkServer(0, target, prepared.append, run, InvalidRequest).serve()
