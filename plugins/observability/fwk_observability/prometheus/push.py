"""Pushes the metrics to a gateway, from which Prometheus fetches them."""

from __future__ import annotations

import logging
import threading
from functools import partial
from http.client import HTTPException

from prometheus_client import CollectorRegistry, push_to_gateway
from prometheus_client.exposition import basic_auth_handler, default_handler

from fwk_observability.prometheus import PrometheusOptions

log = logging.getLogger("fwk.prometheus")

TIMEOUT = 4.0
"""Seconds a push may take: closing an observer has five."""


class Push:
    """A thread that pushes every few seconds, and once more at the end. A failure is logged once until one succeeds."""

    def __init__(self, registry: CollectorRegistry, options: PrometheusOptions) -> None:
        handler = default_handler
        if options.metric_gateway_credential is not None:
            user, _, password = options.metric_gateway_credential.partition(":")
            handler = partial(basic_auth_handler, username=user, password=password)
        labels = dict(label.split("=", 1) for label in options.metric_gateway_grouping_key)
        self._address = options.metric_gateway or ""
        self._send = partial(
            push_to_gateway,
            self._address,
            job=options.metric_gateway_job_name,
            registry=registry,
            grouping_key=labels,
            timeout=TIMEOUT,
            handler=handler,
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
