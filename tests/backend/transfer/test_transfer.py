"""What any `KVTransfer` does: the same cases over the fake and over NIXL, there between two processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from backend.attention.kv_cache import KVCache
from backend.transfer.base import KVTransfer, LayoutMismatchError, TransferError, TransferStats
from backend.transfer.local import LocalNetwork, LocalTransfer
from backend.transfer.nixl import NixlTransfer
from tests.backend.transfer.workers import MODEL, NUM_LAYERS, Owner, Puller, RemoteOwner, content, wait_until

TIMEOUT_S = 20.0
SOON_S = 2.0  # at once, on a machine that does much else
SOURCE_PAGES = (90, 3, 4, 5, 41, 12)
PAGES = (0, 63, 17, 18, 19, 5)


@dataclass
class World:
    owner: Owner | RemoteOwner
    new_puller: Callable[..., Puller]


@pytest.fixture(params=["local", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    network = LocalNetwork()
    owner: Owner | RemoteOwner
    with ExitStack() as closing:
        if request.param == "local":
            owner = Owner(lambda cache, on_pulled: LocalTransfer(cache, "owner", MODEL, on_pulled, network))
            closing.callback(owner.close)
        else:
            owner = request.getfixturevalue("remote")("shared")

        def new_transfer(cache: KVCache, model: str, on_pulled: Callable[[str], None]) -> KVTransfer:
            if request.param == "local":
                return LocalTransfer(cache, "puller", model, on_pulled, network)
            return NixlTransfer(cache, "puller", model, on_pulled)

        def new_puller(**different: Any) -> Puller:
            puller = Puller(new_transfer, **different)
            closing.callback(puller.transfer.close)
            return puller

        yield World(owner, new_puller)
    assert "kv-transfer" not in [thread.name for thread in threading.enumerate()]


def pull(
    world: World,
    puller: Puller,
    key: str,
    stamp: int,
    pages: Sequence[int] = PAGES,
    source_pages: Sequence[int] = SOURCE_PAGES,
    *,
    by_layer: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Future[TransferStats]:
    source = world.owner.source()
    return puller.transfer.pull(
        source, source_pages, pages, stamp=stamp, key=key, timeout_s=timeout_s, by_layer=by_layer
    )


def test_pages_arrive_where_they_should_and_nowhere_else(world: World) -> None:
    puller = world.new_puller()
    stamp = world.owner.prefill("exact", SOURCE_PAGES, 1)
    stats = pull(world, puller, "exact", stamp).result()
    assert stats.num_bytes == 2 * NUM_LAYERS * len(PAGES) * 16 * 2 * 64 * 4
    assert 0 < stats.seconds < TIMEOUT_S
    puller.check(dict(zip(PAGES, content(1, len(PAGES)), strict=True)))


def test_the_source_hears_of_it_once(world: World) -> None:
    puller = world.new_puller()
    stamp = world.owner.prefill("once", SOURCE_PAGES, 1)
    world.owner.prefill("forgotten", SOURCE_PAGES, 1)
    world.owner.forget("forgotten")
    for key in ("once", "once", "forgotten", "unknown"):
        pull(world, puller, key, stamp).result()
    stamp = world.owner.prefill("last", SOURCE_PAGES, 1)
    pull(world, puller, "last", stamp).result()
    wait_until(lambda: world.owner.pulled("last") == 1)
    assert [world.owner.pulled(key) for key in ("once", "forgotten", "unknown")] == [1, 0, 0]


def test_many_at_once(world: World) -> None:
    puller = world.new_puller()
    futures: list[Future[TransferStats]] = []
    read: dict[int, torch.Tensor] = {}
    for i in range(30):
        source_pages, pages = (3 * i + 2, 3 * i + 1, 3 * i), (2 * i, 2 * i + 1)
        stamp = world.owner.prefill(f"many {i}", source_pages, i)
        futures.append(pull(world, puller, f"many {i}", stamp, pages, source_pages[:2]))
        read.update(zip(pages, content(i, 3), strict=False))
    for future in futures:
        future.result()
    puller.check(read)
    wait_until(lambda: all(world.owner.pulled(f"many {i}") == 1 for i in range(30)))


@pytest.mark.parametrize("different", ["model", "dtype"])
def test_no_byte_moves_between_workers_that_keep_kv_differently(world: World, different: str) -> None:
    puller = world.new_puller(model="others") if different == "model" else world.new_puller(dtype=torch.bfloat16)
    stamp = world.owner.prefill(f"layout {different}", SOURCE_PAGES, 1)
    with pytest.raises(LayoutMismatchError, match=rf"keeps KV as .*{MODEL}.* this worker as .*(others|bfloat16)"):
        pull(world, puller, f"layout {different}", stamp).result()
    puller.check({})


@pytest.mark.parametrize(
    "source_pages, pages",
    [((1, 96), (0, 1)), ((-1, 1), (0, 1)), ((0, 1), (0, 64)), ((0, 1), (0, -1)), ((0,), (0, 1)), ((), ())],
)
def test_pages_that_do_not_exist_are_refused(
    world: World, source_pages: tuple[int, ...], pages: tuple[int, ...]
) -> None:
    puller = world.new_puller()
    with pytest.raises(TransferError, match="pages"):
        pull(world, puller, "nothing", 0, pages, source_pages).result()
    puller.check({})


def test_pages_that_were_released_before_are_an_error(world: World) -> None:
    puller = world.new_puller()
    stamp = world.owner.prefill("released", SOURCE_PAGES, 1)
    world.owner.release(SOURCE_PAGES)
    with pytest.raises(TransferError, match="released the pages of released meanwhile"):
        pull(world, puller, "released", stamp).result()
    stamp = world.owner.prefill("next", SOURCE_PAGES, 2)
    pull(world, puller, "next", stamp).result()
    wait_until(lambda: world.owner.pulled("next") == 1)
    assert world.owner.pulled("released") == 0
    puller.check(dict(zip(PAGES, content(2, len(PAGES)), strict=True)))


def test_pages_that_are_released_meanwhile_are_never_taken_for_good(world: World) -> None:
    puller = world.new_puller()
    chance = random.Random(0)
    source_pages, pages = range(10, 58), range(48)
    expected = torch.stack(content(3, 48), dim=2)
    usual_s = 0.005
    for i in range(40):
        stamp = world.owner.prefill(f"race {i}", source_pages, 3)
        world.owner.release(source_pages, chance.uniform(0.1, 2.0) * usual_s)
        try:
            usual_s = pull(world, puller, f"race {i}", stamp, pages, source_pages).result().seconds
            assert torch.equal(puller.cache.data[:, :, :48], expected)
        except TransferError as error:
            assert "meanwhile" in str(error)
        wait_until(lambda stamp=stamp: world.owner.is_released(source_pages, stamp))


def test_layers_are_read_as_they_come(world: World) -> None:
    puller = world.new_puller()
    stamp = world.owner.begin("by layer", SOURCE_PAGES)
    future = pull(world, puller, "by layer", stamp, by_layer=True)
    read = {page: torch.zeros_like(tensor) for page, tensor in zip(PAGES, content(1, len(PAGES)), strict=True)}
    for layer in range(NUM_LAYERS):
        assert not future.done()
        world.owner.prefill_layer(SOURCE_PAGES, layer, 1)
        for page, tensor in zip(PAGES, content(1, len(PAGES)), strict=True):
            read[page][layer] = tensor[layer]
        wait_until(lambda layer=layer: bool(puller.cache.data[layer, :, list(PAGES)].ne(0).all()))
        puller.check(read)
    assert future.result().num_bytes == 2 * NUM_LAYERS * len(PAGES) * 16 * 2 * 64 * 4
    wait_until(lambda: world.owner.pulled("by layer") == 1)


def test_many_prefills_are_read_by_layer_at_once(world: World) -> None:
    puller = world.new_puller()
    futures: list[Future[TransferStats]] = []
    read: dict[int, torch.Tensor] = {}
    for i in range(10):
        source_pages, pages = (3 * i + 2, 3 * i), (2 * i, 2 * i + 1)
        stamp = world.owner.begin(f"prefill {i}", source_pages)
        futures.append(pull(world, puller, f"prefill {i}", stamp, pages, source_pages, by_layer=True))
        read.update(zip(pages, content(i, 2), strict=True))
    stamp = world.owner.prefill("ready", (90, 91), 11)
    pull(world, puller, "ready", stamp, (60, 61), (90, 91)).result()
    read.update(zip((60, 61), content(11, 2), strict=True))
    for layer in range(NUM_LAYERS):
        for i in reversed(range(10)):
            world.owner.prefill_layer((3 * i + 2, 3 * i), layer, i)
    for future in futures:
        future.result()
    puller.check(read)


@pytest.mark.parametrize("num_layers", [0, 2, 4])
def test_pages_that_are_released_between_layers_are_an_error(world: World, num_layers: int) -> None:
    puller = world.new_puller()
    key = f"released after {num_layers}"
    stamp = world.owner.begin(key, SOURCE_PAGES)
    for layer in range(min(num_layers, NUM_LAYERS - 1)):
        world.owner.prefill_layer(SOURCE_PAGES, layer, 1)
    future = pull(world, puller, key, stamp, by_layer=True)
    wait_until(lambda: bool(puller.cache.data[: min(num_layers, NUM_LAYERS - 1), :, list(PAGES)].ne(0).all()))
    world.owner.release(SOURCE_PAGES)
    if num_layers == NUM_LAYERS:  # by somebody else, whose prefill is ahead
        world.owner.begin(f"{key}, next", SOURCE_PAGES)
        for layer in range(NUM_LAYERS):
            world.owner.prefill_layer(SOURCE_PAGES, layer, 2)
    with pytest.raises(TransferError, match=f"released the pages of {key} meanwhile"):
        future.result(SOON_S)
    assert world.owner.pulled(key) == 0


def test_a_prefill_that_does_not_go_on_is_given_up(world: World) -> None:
    puller = world.new_puller()
    stamp = world.owner.begin("stuck", SOURCE_PAGES)
    with pytest.raises(TransferError, match="did not answer in time"):
        pull(world, puller, "stuck", stamp, by_layer=True, timeout_s=0.1).result(SOON_S)
    stamp = world.owner.prefill("next", SOURCE_PAGES, 1)
    assert pull(world, puller, "next", stamp).result().seconds < SOON_S


def test_a_peer_that_was_dropped_can_be_pulled_from_again(world: World) -> None:
    puller = world.new_puller()
    for seed in (1, 2):
        puller.transfer.connect(world.owner.source(), timeout_s=TIMEOUT_S).result()
        stamp = world.owner.prefill(f"dropped {seed}", SOURCE_PAGES, seed)
        pull(world, puller, f"dropped {seed}", stamp).result()
        puller.check(dict(zip(PAGES, content(seed, len(PAGES)), strict=True)))
        puller.transfer.drop_peer(world.owner.source().name)


def test_a_peer_that_is_not_there_is_an_error(world: World) -> None:
    puller = world.new_puller()
    nobody = replace(world.owner.source(), name="nobody", agent=b"nobody at all")
    with pytest.raises(TransferError, match="nobody"):
        puller.transfer.pull(nobody, (0,), (0,), stamp=0, key="", timeout_s=0.5).result()
    with pytest.raises(TransferError, match="nobody"):
        puller.transfer.connect(nobody, timeout_s=0.5).result()


def test_every_pull_ends_when_the_transfer_is_closed(world: World) -> None:
    puller = world.new_puller()
    stamp = world.owner.prefill("closed", SOURCE_PAGES, 1)
    futures = [pull(world, puller, "closed", stamp) for _ in range(20)]
    puller.transfer.close()
    puller.transfer.close()
    assert all(future.done() for future in futures)
    with pytest.raises(TransferError, match="puller is closed"):
        pull(world, puller, "closed", stamp).result()
