"""Pushes the metrics to a gateway, from which Prometheus fetches them."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.request import HTTPRedirectHandler, Request, build_opener

from prometheus_client import CollectorRegistry, push_to_gateway

from fwk_observability.prometheus import PrometheusOptions

log = logging.getLogger("fwk.prometheus")

TIMEOUT = 4.0
"""Seconds a push may take: closing an observer has five."""


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Refuse: what a redirect says is neither read nor followed."""


def send(
    url: str,
    method: str,
    timeout: float | None,
    headers: Sequence[tuple[str, str]],
    data: bytes,
    credential: str | None = None,
) -> Callable[[], None]:
    """A handler as prometheus_client wants it, which reads a reply's first lines and no body.

    credential: ``USER:PASSWORD``.
    """

    def handle() -> None:
        request = Request(url, data, dict(headers), method=method)
        if credential is not None:
            request.add_header("Authorization", "Basic " + base64.b64encode(credential.encode()).decode())
        with build_opener(_NoRedirect).open(request, timeout=timeout):
            pass

    return handle


class Push:
    """A thread that pushes every few seconds, and once more at the end. A failure is logged once until one succeeds."""

    def __init__(self, registry: CollectorRegistry, options: PrometheusOptions) -> None:
        labels = dict(label.split("=", 1) for label in options.metric_gateway_grouping_key)
        self._address = options.metric_gateway or ""
        self._send = partial(
            push_to_gateway,
            self._address,
            job=options.metric_gateway_job_name,
            registry=registry,
            grouping_key=labels,
            timeout=TIMEOUT,
            handler=partial(send, credential=options.metric_gateway_credential),
        )
        self._interval = options.metric_gateway_push_interval
        self._is_failing = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fwk-metrics-push", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push what has happened since."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.push()
        self.push()

    def push(self) -> None:
        """One push."""
        try:
            self._send()
        except (OSError, HTTPException) as error:
            if not self._is_failing:
                log.warning("metrics cannot be pushed to %s: %s; trying on", self._address, error)
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("metrics are pushed to %s again", self._address)
        self._is_failing = False
