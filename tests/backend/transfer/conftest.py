from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.backend.transfer.workers import RemoteOwner


@pytest.fixture(scope="session")
def remote() -> Iterator[Callable[[str], RemoteOwner]]:
    """Processes to read from, by name; started again if they have died. TCP alone leads to some of them."""
    owners: dict[str, RemoteOwner] = {}

    def get(name: str) -> RemoteOwner:
        if name in owners and not owners[name].is_alive:
            owners.pop(name).kill()
        if name not in owners:
            owners[name] = RemoteOwner(name, "tcp" if "tcp" in name else None)
        return owners[name]

    # All at once: most of a start is the import of torch.
    for name in ("shared", "killed", "killed tcp", "stopped tcp"):
        get(name)
    yield get
    for owner in owners.values():
        owner.kill()
