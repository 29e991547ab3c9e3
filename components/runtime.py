"""The only file that knows Dynamo: runtime, endpoints, calls, model registration, HTTP errors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import uvloop
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import HttpError
from dynamo.runtime import Client, DistributedRuntime, Endpoint
from dynamo.runtime import Context as DynamoContext
from prometheus_client import CollectorRegistry, generate_latest

from components.config import CommonConfig

Message = dict[str, Any]

log = logging.getLogger(__name__)

# Dynamo's frontend sheds load by KV blocks; the router reports itself as all free or all full.
_ALL_BLOCKS = 100
# How long a worker may take to close a stream after its last message.
_DRAIN_S = 5.0
_MISSING_S = 3
"""Seconds without an entry in discovery after which a process is sure that it has none."""
# What a call says when the other side is gone, as text: Dynamo 1.4 does not raise its own classes here.
_LOST = (
    "Disconnected",
    "CannotConnect",
    "Connection refused",
    "ConnectionTimeout",
    "StreamIncomplete",
    "not found",
    "ResponseTimeout",
    "Unlinked response",
    "NATS request",
    "deadline has elapsed",
    "BackendCancelled",
)


class WorkerLostError(RuntimeError):
    """The worker, or the way to it, broke before the block was done; another attempt may succeed."""


class Context(Protocol):
    """What is used of Dynamo's request context."""

    @property
    def metadata(self) -> Any: ...
    def id(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def stop_generating(self) -> None: ...
    def detached(self, id: str) -> Context: ...
    def async_killed_or_stopped(self) -> asyncio.Future[bool]: ...


Handler = Callable[[Message, Context], AsyncIterator[Message]]


def refuse(status: int, message: str) -> NoReturn:
    """Ends a request with an HTTP status, as far as Dynamo's frontend passes it on; Dynamo logs it with a traceback."""
    raise HttpError(status, message) from None


def run(main: Callable[[], Coroutine[Any, Any, int]], config: CommonConfig) -> NoReturn:
    """Runs a component's `main` to its exit status, with the environment that Dynamo reads from."""
    logging.basicConfig(
        level=os.environ.get("SANGAM_LOG", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    env = {
        "DYN_DISCOVERY_BACKEND": config.discovery,
        "DYN_REQUEST_PLANE": config.request_plane,
        "DYN_EVENT_PLANE": "nats",
        "DYN_FILE_KV": config.discovery_dir,
        "ETCD_ENDPOINTS": config.etcd,
        "NATS_SERVER": config.nats,
    }
    os.environ.update({key: value for key, value in env.items() if value})
    if not os.environ.get("NATS_SERVER"):
        print("error: no NATS server: give --nats nats://HOST:PORT", file=sys.stderr)
        sys.exit(2)
    status = uvloop.run(main())
    sys.stdout.flush()
    sys.stderr.flush()
    # Dynamo's threads may abort an interpreter that takes its time to finalize.
    os._exit(status)


class Runtime:
    """One process's place in the graph. SIGTERM and SIGINT deregister it and let open streams end."""

    def __init__(self, config: CommonConfig) -> None:
        loop = asyncio.get_running_loop()
        self._namespace = get_worker_namespace(config.namespace)
        self._is_file_discovery = config.discovery == "file"
        self._runtime = DistributedRuntime(
            loop,
            os.environ["DYN_DISCOVERY_BACKEND"],
            os.environ["DYN_REQUEST_PLANE"],
            event_plane=os.environ["DYN_EVENT_PLANE"],
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.shutdown)

        self.was_told_to_stop = False

    def shutdown(self) -> None:
        """Deregisters this process and lets open streams end; `serve` then returns."""
        self.was_told_to_stop = True
        self._runtime.shutdown()

    def on_post(self, route: str, handler: Callable[[Message], Awaitable[Message]]) -> None:
        """Serves POST /engine/ROUTE on the process's status port: JSON object in, JSON object out."""
        self._runtime.register_engine_route(route, handler)

    def endpoint(self, component: str, name: str) -> Endpoint:
        return self._runtime.endpoint(f"{self._namespace}.{component}.{name}")

    def serve(self, endpoint: Endpoint, handler: Handler, registry: CollectorRegistry | None) -> asyncio.Future[None]:
        """Serves until shutdown; `registry` shows in the process's /metrics."""
        if registry is not None:
            endpoint.metrics.register_prometheus_expfmt_callback(lambda: generate_latest(registry).decode())
        return asyncio.ensure_future(endpoint.serve_endpoint(handler, graceful_shutdown=True))

    async def forgotten(self, endpoint: Endpoint) -> None:
        """Returns when discovery has dropped this process, which must then be started again.

        It hung (or the machine slept) for longer than its lease. With file discovery Dynamo goes on
        trying to renew what is deleted; with etcd it shuts the runtime down by itself.
        """
        if not self._is_file_discovery:
            await asyncio.Event().wait()
        client = await endpoint.client()
        num_missing = 0
        was_listed = False
        while num_missing < _MISSING_S:
            is_listed = endpoint.connection_id() in client.instance_ids()
            was_listed |= is_listed
            num_missing = num_missing + 1 if was_listed and not is_listed else 0
            await asyncio.sleep(1.0 if was_listed else 0.05)  # it may be stopped as soon as it is there


class Workers:
    """The instances of a worker endpoint, as discovery lists them, and calls to one of them.

    Every stream ends with a message whose `is_done` is true.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._draining: set[asyncio.Task[None]] = set()

    @classmethod
    async def of(cls, runtime: Runtime, component: str, endpoint: str = "generate") -> Workers:
        return cls(await runtime.endpoint(component, endpoint).client())

    def ids(self) -> list[int]:
        return list(self._client.instance_ids())

    async def ask(self, worker_id: int, message: Message) -> Message:
        """The one answer to a call that belongs to no request.

        Raises:
            WorkerLostError: there was none.
        """
        try:
            async for item in await self._client.direct(message, worker_id):
                if not item.is_error():
                    return cast(Message, item.data())
        except Exception as error:  # Dynamo raises plain Exception, too
            raise WorkerLostError(str(error)) from None
        raise WorkerLostError("no answer")

    async def call(
        self, worker_id: int, message: Message, context: Context, lost: asyncio.Event
    ) -> AsyncGenerator[Message]:
        """The worker's messages, up to one with `is_done`.

        Ends early, without an error, when `context` is stopped.

        Args:
            context: of this call alone; stopping it stops the worker's side.
            lost: set when the worker is known to be gone though its stream does not break.

        Raises:
            WorkerLostError: it could not be reached, broke off, or `lost` was set.
            RuntimeError: its handler failed.
        """
        gone = asyncio.ensure_future(lost.wait())
        stopped = context.async_killed_or_stopped()
        done = False
        try:
            stream = await self._race(
                self._client.direct(message, worker_id, context=cast(DynamoContext, context)), gone, stopped
            )
            while stream is not None:
                item = await self._race(anext(stream, None), gone, stopped)
                if item is None:
                    return
                if item.is_error():
                    raise RuntimeError("; ".join(item.comments() or ["unknown error"]))
                answer = item.data()
                if answer["is_done"]:
                    done = True
                    self._drain(stream, context)
                yield answer
                if done:
                    return
        finally:
            gone.cancel()
            if not done:
                context.stop_generating()

    def _drain(self, stream: AsyncIterator[Any], context: Context) -> None:
        """Lets the worker end its stream in its own time: stopped short, it logs an error for every block."""

        async def to_the_end() -> None:
            try:
                await asyncio.wait_for(anext(stream, None), _DRAIN_S)
            except Exception as error:
                log.debug("after the last message: %s", error)
            context.stop_generating()

        task = asyncio.ensure_future(to_the_end())
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _race(self, step: Any, gone: asyncio.Future[Any], stopped: asyncio.Future[bool]) -> Any:
        """The result of `step`, or None if the request was stopped first."""
        task = asyncio.ensure_future(step)
        await asyncio.wait({task, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            try:
                return task.result()
            except Exception as error:
                text = str(error)
                if any(sign in text for sign in _LOST):
                    raise WorkerLostError(text) from None
                raise RuntimeError(text) from None
        task.cancel()
        if stopped.done():
            return None
        raise WorkerLostError("the worker went silent")


class ModelRegistration:
    """Makes the model visible to the frontends, and withdraws it."""

    def __init__(self, tokens: Endpoint, tensors: Endpoint) -> None:
        self._tokens, self._tensors = tokens, tensors
        self._load: WorkerMetricsPublisher | None = None

    async def show(self, name: str, directory: Path, context_length: int, tensor_config: bytes) -> None:
        """Registers chat and completions under `name`, and a Tensor model under the same name."""
        config = ModelRuntimeConfig()
        config.context_length = context_length
        config.total_kv_blocks = _ALL_BLOCKS
        await register_model(
            model_input=ModelInput.Tokens,
            model_type=ModelType.Chat | ModelType.Completions,
            endpoint=self._tokens,
            model_path=str(directory),
            model_name=name,
            worker_type=WorkerType.Aggregated,
            runtime_config=config,
        )
        # The frontend's list of models shows the length of either one.
        length = ModelRuntimeConfig()
        length.context_length = context_length
        await register_model(
            model_input=ModelInput.Tensor,
            model_type=ModelType.TensorBased,
            endpoint=self._tensors,
            model_path=name,
            model_name=name,
            worker_type=WorkerType.Aggregated,
            runtime_config=length,
            tensor_model_config={
                "name": "",
                "inputs": [],
                "outputs": [],
                "triton_model_config": tensor_config,
            },
        )
        if self._load is None:
            self._load = WorkerMetricsPublisher()
            await self._load.create_endpoint(self._tokens)

    async def hide(self) -> None:
        await unregister_model(self._tokens)
        await unregister_model(self._tensors)

    def report_overload(self, is_overloaded: bool) -> None:
        """Tells the frontends whether to turn new requests away before they get here."""
        if self._load is not None:
            used = _ALL_BLOCKS if is_overloaded else 0
            self._load.publish(dp_rank=0, active_decode_blocks=used, kv_used_blocks=used)
