"""Load reports over NATS: workers publish, routers listen."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from components.protocol import LoadReport

log = logging.getLogger(__name__)


class LoadBus:
    """A connection that is re-established for as long as it takes."""

    def __init__(self, client: Client, subject: str) -> None:
        self._client = client
        self._subject = subject
        # On the monotonic clock; infinity while there is no connection, so that nobody's silence counts.
        self.connected_since = math.inf

    @classmethod
    async def connect(cls, url: str, namespace: str) -> LoadBus:
        """Waits until the server is there."""
        bus = cls(Client(), f"sangam.{namespace}.load")

        async def on_connected() -> None:
            bus.connected_since = time.monotonic()
            log.info("connected to NATS")

        async def on_lost() -> None:
            bus.connected_since = math.inf
            log.warning("lost NATS; reconnecting")

        async def on_error(error: Exception) -> None:
            log.debug("NATS: %s", error)

        # Dynamo's own connection gives up at once; what is started before NATS waits for it here.
        log.info("connecting to NATS at %s", url)
        await bus._client.connect(
            url,
            reconnected_cb=on_connected,
            disconnected_cb=on_lost,
            error_cb=on_error,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            allow_reconnect=True,
        )
        bus.connected_since = time.monotonic()
        return bus

    @property
    def is_connected(self) -> bool:
        return math.isfinite(self.connected_since)

    async def publish(self, report: LoadReport) -> None:
        """Drops the report while there is no connection: an old one is worth nothing."""
        if self._client.is_connected:
            try:
                await self._client.publish(self._subject, json.dumps(asdict(report)).encode())
            except nats.errors.Error as error:
                log.debug("load report dropped: %s", error)

    async def listen(self, receive: Callable[[LoadReport], None]) -> None:
        """Calls `receive` for every report from now on; what cannot be read is logged and skipped."""

        async def on_message(message: Msg) -> None:
            try:
                report = LoadReport.from_wire(json.loads(message.data))
            except (ValueError, TypeError, KeyError) as error:
                log.warning("unreadable load report: %r", error)
                return
            receive(report)

        await self._client.subscribe(self._subject, cb=on_message)

    async def close(self) -> None:
        await self._client.close()
