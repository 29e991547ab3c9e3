"""The router: registers the model, validates, places every block, streams committed tokens.

It holds no weights and imports no torch. One event loop owns all its state.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

from backend.core.auto_threshold import AutoHybridPolicy
from backend.core.request import Request, RequestStatus
from backend.core.routing import ConditionalPolicy, HybridPolicy, Policy
from backend.core.sampling_params import InvalidRequestError
from components.chunks import FINISH_REASONS, Piece, chunk
from components.config import RouterConfig, from_command_line
from components.dispatcher import Dispatcher, RequestFailedError, Trip
from components.load_bus import LoadBus
from components.protocol import ModelCard
from components.request_parser import Limits, build_request, dllm_options, parse_options, parse_tokens_request
from components.router_metrics import Account, RouterMetrics
from components.runtime import Context, Message, ModelRegistration, Runtime, Workers, refuse, run
from components.steps_file import StepsFile
from components.tensor_api import model_config, parse_tensor_request, tensor_response
from components.text import TextProcessor, TextStream

log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.1


class Router:
    """Serves `router.generate` (token ids, for OpenAI) and `router.generate_tensor` (for KServe)."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._steps: StepsFile | None = None
        self._tokens_in_flight = 0
        self._num_requests = itertools.count()
        self._refused_tokens = 0
        """Size of the request refused last for want of room; 0 once it would fit."""

    async def main(self) -> int:
        """Runs until it is told to stop; the exit status."""
        config = self.config
        try:
            self.text = TextProcessor(config.model)
        except Exception as error:  # tokenizers raises plain Exception
            log.error("cannot read the tokenizer of %s: %s", config.model, error)
            return 1
        if config.steps_file:
            try:
                self._steps = StepsFile(config.steps_file)
            except OSError as error:
                log.error("cannot write steps_file %s: %s", config.steps_file, error.strerror)
                return 1
        bus = await LoadBus.connect(os.environ["NATS_SERVER"], config.namespace)
        runtime = Runtime(config)
        calls = {name: await Workers.of(runtime, name) for name in ("prefill_worker", "colocated_worker")}
        policy = _policy(config)
        self.dispatcher = Dispatcher(
            policy,
            calls,
            await Workers.of(runtime, "colocated_worker", "prefilled"),
            bus,
            max_attempts=config.max_attempts,
            worker_timeout_s=config.worker_timeout_s,
            placement_timeout_s=config.placement_timeout_s,
        )
        self.metrics = RouterMetrics(self.dispatcher, policy)
        await bus.listen(self.dispatcher.fleet.receive)
        tokens = runtime.endpoint("router", "generate")
        tensors = runtime.endpoint("router", "generate_tensor")
        self.registration = ModelRegistration(tokens, tensors)
        serving = asyncio.gather(
            runtime.serve(tokens, self.generate, self.metrics.registry),
            runtime.serve(tensors, self.generate_tensor, None),
        )
        watching = asyncio.ensure_future(self._watch())
        forgotten = asyncio.ensure_future(runtime.forgotten(tokens))
        tasks: set[asyncio.Future[Any]] = {serving, watching, forgotten}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            log.error("the router's watch failed: %r", watching.exception())
            return 1
        if forgotten.done():
            log.error("hung for so long that discovery forgot this process: it has to be started again")
            return 1
        forgotten.cancel()
        watching.cancel()
        await serving
        await bus.close()
        return 0

    async def _watch(self) -> None:
        """Shows the model while a worker can serve it; reports overload."""
        shown: ModelCard | None = None
        while True:
            self.dispatcher.watch()
            self.metrics.refresh(self._tokens_in_flight)
            card = self.dispatcher.fleet.model if self.dispatcher.fleet.accepts_requests else None
            if card != shown:
                if shown is not None:
                    await self.registration.hide()
                    log.info("model %s withdrawn: no worker can serve it", self.config.model_name)
                if card is not None:
                    name = self.config.model_name
                    length = Limits.of(self.config, card).context_length
                    await self.registration.show(name, self.config.model, length, model_config(name))
                    log.info("model %s is served", name)
                shown = card
            self._report_load()
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _report_load(self) -> None:
        """Has the frontends refuse, with a real 429 also for streams, what would be refused here.

        They turn away everything or nothing: there is no room when the request refused last does not
        fit (a huge one counts as a tenth of the queue, lest it keep all others out), nor a default one.
        """
        limit = self.config.max_queued_tokens
        needed = max(min(self._refused_tokens, limit // 10), self.config.default_canvas_length)
        is_full = 0 < self._tokens_in_flight and self._tokens_in_flight + needed > limit
        if not is_full:
            self._refused_tokens = 0
        self.registration.report_overload(is_full)

    def _request_id(self, context: Context) -> str:
        """The client's id may come twice (it can be a header); ours may not."""
        return f"{context.id()}#{next(self._num_requests)}"

    def _card(self) -> ModelCard:
        card = self.dispatcher.fleet.model
        if card is None:
            refuse(503, f"no worker serves {self.config.model_name} at the moment; try again")
        return card

    async def generate(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """One request of the OpenAI frontend, tokenized; yields chunks of committed tokens."""
        card = self._card()
        try:
            request = parse_tokens_request(
                message,
                context.metadata.copy(),
                self._request_id(context),
                card,
                Limits.of(self.config, card),
                time.time(),
            )
        except InvalidRequestError as error:
            self._refuse(error)
        stop = (message.get("stop_conditions") or {}).get("stop") or ()
        async with aclosing(self._answer(request, stop, context)) as answer:
            async for piece in answer:
                yield chunk(piece, self.text.tokenizer)

    async def generate_tensor(self, message: Message, context: Context) -> AsyncIterator[Message]:
        """One KServe request; yields responses, a single one unless it asks to stream."""
        card = self._card()
        try:
            parsed = parse_tensor_request(message, self.text)
            options = {**parse_options(dllm_options((), context.metadata.copy())), **parsed.options}
            request = build_request(
                self._request_id(context), parsed.prompt, options, card, Limits.of(self.config, card), time.time()
            )
        except InvalidRequestError as error:
            self._refuse(error)
        model = message["model"]
        held = Piece([], "")
        count = 0
        async with aclosing(self._answer(request, parsed.stop, context)) as answer:
            async for piece in answer:
                count += len(piece.tokens)
                held = held + piece
                if held.finish_reason:
                    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": count}
                    yield tensor_response(model, held, request.params.logprobs, usage)
                elif parsed.is_streaming:
                    yield tensor_response(model, held, request.params.logprobs)
                    held = Piece([], "")

    def _refuse(self, error: InvalidRequestError) -> NoReturn:
        self.metrics.requests.labels("refused").inc()
        refuse(400, str(error))

    async def _answer(self, request: Request, stop: Sequence[str], context: Context) -> AsyncGenerator[Piece]:
        """The answer as it is committed, cut at stop strings; the last piece says how it ended.

        Ends without a last piece when the client has gone.
        """
        with self._admitted(request) as account:
            text = TextStream(self.text.tokenizer, stop, request.params.min_tokens)
            sent = 0
            while True:
                async with aclosing(self._run_block(request, context, account.trip)) as progress:
                    async for _ in progress:
                        tokens, status = request.answer(sent)
                        kept, piece = text.push(tokens)
                        logprobs = request.logprobs(sent, len(kept))
                        sent += len(tokens)
                        account.num_tokens += len(kept)
                        if text.is_stopped:
                            account.outcome = "stop"
                            request.transition(RequestStatus.FINISHED_STOP)
                            yield Piece(kept, piece, "stop", logprobs)
                            return
                        if status is not None:
                            account.outcome = FINISH_REASONS[status]
                            request.transition(status)
                            yield Piece(tokens, piece + text.finish(), account.outcome, logprobs)
                            return
                        if tokens:
                            yield Piece(tokens, piece, logprobs=logprobs)
                if context.is_stopped():
                    return
                request.next_block()

    async def _run_block(self, request: Request, context: Context, trip: Trip) -> AsyncGenerator[None]:
        try:
            async with aclosing(self.dispatcher.run_block(request, context, trip)) as progress:
                async for _ in progress:
                    yield
        except InvalidRequestError as error:
            self._refuse(error)
        except RequestFailedError as error:
            log.error("request %s failed: %s", request.request_id, error)
            refuse(500, str(error))

    @contextmanager
    def _admitted(self, request: Request) -> Iterator[Account]:
        """Holds the request's share of the router's bounded queue; refuses it if there is no room."""
        size = request.sequence_length
        if size > self.dispatcher.capacity_tokens > 0:
            self._refuse(
                InvalidRequestError(
                    f"prompt + canvas = {size} tokens do not fit any worker's KV cache "
                    f"({self.dispatcher.capacity_tokens} tokens)"
                )
            )
        limit = self.config.max_queued_tokens
        if self._tokens_in_flight and self._tokens_in_flight + size > limit:
            self.metrics.requests.labels("overload").inc()
            self._refused_tokens = size
            self._report_load()
            refuse(429, f"overloaded: {self._tokens_in_flight} of {limit} tokens in flight; try again later")
        self._tokens_in_flight += size
        account = Account()
        started = time.monotonic()
        try:
            yield account
        except BaseException as error:
            if not isinstance(error, GeneratorExit | asyncio.CancelledError):
                account.outcome = "failed"
            raise
        finally:
            self._tokens_in_flight -= size
            self.metrics.request_done(account, time.monotonic() - started)
            if account.outcome in FINISH_REASONS.values():
                self._write_steps(request.request_id, account.trip)

    def _write_steps(self, request_id: str, trip: Trip) -> None:
        if self._steps:
            try:
                self._steps.add(request_id, trip.num_steps)
            except OSError as error:
                log.error("no more rows in steps_file: %s", error)
                self._steps = None


def _policy(config: RouterConfig) -> Policy:
    if config.routing == "conditional":
        return ConditionalPolicy(config.max_local_prefill_length, config.max_prefill_queue_size)
    if config.overflow_threshold == "auto":
        return AutoHybridPolicy()
    return HybridPolicy(config.overflow_threshold)


def main() -> None:
    config = from_command_line("router", RouterConfig)
    run(Router(config).main, config)


if __name__ == "__main__":
    main()
