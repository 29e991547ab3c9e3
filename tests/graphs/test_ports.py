from __future__ import annotations

import socket
from itertools import islice

import pytest

from graphs.ports import PortTaken, free_ports, require_free


def test_free_ports_are_distinct_small_enough_for_dynamo_and_can_be_listened_on() -> None:
    ports = list(islice(free_ports(), 20))
    assert len(set(ports)) == 20 and max(ports) < 2**15
    socket.create_server(("127.0.0.1", ports[0])).close()


def test_reserved_ports_are_not_given() -> None:
    reserved = set(range(20_000, 32_760))
    assert next(free_ports(reserved)) not in reserved


def test_a_taken_port_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} .* already in use; .* --http-port"):
            require_free("127.0.0.1", port, "--http-port")
    require_free("127.0.0.1", port, "--http-port")


def test_an_impossible_address_is_an_error_too() -> None:
    with pytest.raises(PortTaken, match="cannot be used"):
        require_free("192.0.2.1", 8000, "--http-port")
