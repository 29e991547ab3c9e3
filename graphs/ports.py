"""TCP ports on this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Collection, Iterator


class PortTaken(RuntimeError):
    """A port cannot be listened on; the message names it and how to choose another."""


def free_ports(reserved: Collection[int] = ()) -> Iterator[int]:
    """Loopback ports nobody listens on just now, each once, none of `reserved`.

    All below 32768: Dynamo keeps DYN_SYSTEM_PORT in 16 signed bits, and from there on Linux gives
    ports to outgoing connections, which would take one while its process restarts.
    """
    for port in random.sample(range(20_000, 32_768), 12_768):
        if port not in reserved:
            with contextlib.suppress(OSError):
                socket.create_server(("127.0.0.1", port)).close()
                yield port


def require_free(host: str, port: int, flag: str) -> None:
    """Checks that a server could listen there.

    Raises:
        PortTaken: it could not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {_text(error)}"
        raise PortTaken(f"port {port} on {host} {reason}; choose another with {flag}") from None


def _text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
