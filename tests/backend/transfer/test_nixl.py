"""What goes wrong between processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from backend.transfer.base import KVSource, TransferError, TransferStats
from backend.transfer.nixl import NixlTransfer
from tests.backend.transfer.workers import Puller, RemoteOwner, content, wait_until

PAGES = tuple(range(40))
TIMEOUT_S = 20.0
SOON_S = 2.0  # at once, on a machine that does much else
Remote = Callable[[str], RemoteOwner]


@pytest.fixture
def puller() -> Iterator[Puller]:
    puller = Puller(lambda cache, model, on_pulled: NixlTransfer(cache, "puller", model, on_pulled))
    yield puller
    puller.transfer.close()
    assert "kv-transfer" not in [thread.name for thread in threading.enumerate()]


def pull(puller: Puller, source: KVSource, stamp: int, timeout_s: float = TIMEOUT_S) -> Future[TransferStats]:
    return puller.transfer.pull(source, PAGES, PAGES, stamp=stamp, key="key", timeout_s=timeout_s)


def pull_from(puller: Puller, owner: RemoteOwner, seed: int) -> None:
    """A pull that succeeds."""
    puller.cache.data.zero_()
    pull(puller, owner.source(), owner.prefill("key", PAGES, seed)).result()
    puller.check(dict(zip(PAGES, content(seed, len(PAGES)), strict=True)))


def test_pages_are_not_written_while_a_step_may_still_write_to_them(
    remote: Remote, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = remote("shared")
    pull_from(puller, owner, 1)
    running = SimpleNamespace(is_passed=False)
    monkeypatch.setattr(puller.transfer, "_fence", lambda: running)
    future = pull(puller, owner.source(), owner.prefill("key", PAGES, 2))
    time.sleep(0.1)
    assert not future.done()
    puller.check(dict(zip(PAGES, content(1, len(PAGES)), strict=True)))
    running.is_passed = True
    future.result()
    puller.check(dict(zip(PAGES, content(2, len(PAGES)), strict=True)))


def test_a_step_that_never_ends_fails_the_pull(remote: Remote, puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = remote("shared")
    monkeypatch.setattr(puller.transfer, "_fence", lambda: SimpleNamespace(is_passed=False))
    with pytest.raises(TransferError, match="did not answer in time"):
        pull(puller, owner.source(), owner.prefill("key", PAGES, 2), timeout_s=0.1).result()
    puller.check({})


@pytest.mark.parametrize("name", ["killed", "killed tcp"])
def test_a_peer_that_dies_fails_pulls_at_once_and_can_come_back(remote: Remote, puller: Puller, name: str) -> None:
    owner = remote(name)
    pull_from(puller, owner, 1)
    source, stamp = owner.source(), owner.prefill("key", PAGES, 1)
    futures = [pull(puller, source, stamp) for _ in range(100)]
    futures[0].result()
    owner.kill()
    died = time.monotonic()
    failed = [future for future in futures if future.exception()]
    futures = [pull(puller, source, stamp) for _ in range(3)]
    assert all(isinstance(future.exception(), TransferError) for future in failed + futures)
    assert time.monotonic() - died < SOON_S
    again = remote(name)
    assert again.source() != source
    pull_from(puller, again, 2)


def test_a_peer_that_hangs_delays_nobody_else(remote: Remote, puller: Puller) -> None:
    hanging, other = remote("stopped tcp"), remote("shared")
    pull_from(puller, hanging, 1)
    pull_from(puller, other, 1)
    source, stamp = hanging.source(), hanging.prefill("key", PAGES, 2)
    hanging.stop()
    begun = time.monotonic()
    hung = [pull(puller, source, stamp, timeout_s=1.0) for _ in range(2)]
    while time.monotonic() < begun + 0.5:
        pull_from(puller, other, 3)
    assert not any(future.done() for future in hung)
    for future in hung:
        with pytest.raises(TransferError, match="stopped tcp did not answer in time"):
            future.result()
    assert 1.0 <= time.monotonic() - begun < 1.0 + SOON_S
    pull_from(puller, other, 4)
    # The caller has given the pages to somebody else by now: what it had asked for must not arrive any more.
    hanging.go_on()
    time.sleep(0.3)
    puller.check(dict(zip(PAGES, content(4, len(PAGES)), strict=True)))
    pull_from(puller, hanging, 5)
    hanging.kill()


def test_a_peer_that_hangs_shortly_is_waited_for(remote: Remote, puller: Puller) -> None:
    owner = remote("stopped tcp")
    pull_from(puller, owner, 1)
    source, stamp = owner.source(), owner.prefill("key", PAGES, 2)
    owner.stop()
    future = pull(puller, source, stamp)
    time.sleep(0.2)
    owner.go_on()
    future.result()
    puller.check(dict(zip(PAGES, content(2, len(PAGES)), strict=True)))


def test_closing_does_not_wait_for_a_peer_that_hangs(remote: Remote, puller: Puller) -> None:
    owner = remote("stopped tcp")
    source, stamp = owner.source(), owner.prefill("key", PAGES, 2)
    owner.stop()
    future = pull(puller, source, stamp)
    time.sleep(0.2)
    begun = time.monotonic()
    puller.transfer.close()
    assert time.monotonic() - begun < SOON_S
    with pytest.raises(TransferError, match="puller is closed"):
        future.result()
    owner.kill()  # UCX may abort it when it goes on


def test_reads_while_being_read_from(request: pytest.FixtureRequest, puller: Puller) -> None:
    keys: list[str] = []
    other = Puller(lambda cache, model, on_pulled: NixlTransfer(cache, "other", model, keys.append))
    request.addfinalizer(other.transfer.close)
    other.cache.data[:, :, :32] = torch.stack(content(1, 32), dim=2)
    puller.cache.data[:, :, 32:64] = torch.stack(content(2, 32), dim=2)
    low, high = range(32), range(32, 64)
    futures = []
    for reader, owner, pages in ((puller, other, low), (other, puller, high)):
        owner.transfer.expect("key")
        stamp = owner.transfer.stamp(pages)
        futures.append(
            reader.transfer.pull(owner.transfer.source(), pages, pages, stamp=stamp, key="key", timeout_s=TIMEOUT_S)
        )
    for future in futures:
        future.result()
    assert torch.equal(puller.cache.data, other.cache.data)
    wait_until(lambda: keys == ["key"])
