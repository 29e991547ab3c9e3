"""A graph run by `serve` as a process of its own: its processes, its metrics, clients to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import openai
import requests

START_S = 90.0
PATIENCE_S = 30.0
MODEL_NAME = "demo"
NUM_ROUTER_ENDPOINTS = 2  # one for tokens, one for tensors
# What the router has charged to a worker.
ACCOUNTS = tuple(f"sangam_router_{name}" for name in ("outstanding_prefill_tokens", "used_pages", "promised_pages"))
# A step for every token: the slowest way to an answer, so that something can happen meanwhile.
SLOW = {"annotations": ["dllm.unmasking:quota", "dllm.steps_per_block:32"]}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Fails, with `what` was waited for, if it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _children(parent: int) -> dict[int, str]:
    """pid -> command line of the running children of a process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            try:
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


class Served:
    """A running graph."""

    def __init__(self, folder: Path, model: Path, graph: str, *flags: str) -> None:
        self.graph = graph
        self._output = folder / "output"
        self.logs = folder / "logs"
        self.steps_file = folder / "steps.csv"
        http, grpc = _free_ports(2)
        self.url, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        command = [sys.executable, "-m", "graphs", "serve", graph, f"--model={model}"]
        command += [f"--served-model-name={MODEL_NAME}", f"--http-port={http}", f"--grpc-port={grpc}"]
        # What `sangam serve` writes down of what runs stays here, too.
        # On a CPU, wherever the tests run: their reference is.
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""}
        command += [f"--log-dir={self.logs}", f"--steps-file={self.steps_file}", *flags]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=self.environment)
        self._status_urls: dict[str, str] = {}
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_until_ready(self) -> None:
        try:
            wait_until(lambda: "Ctrl-C stops" in self.output or not self.is_running, "the graph to start", START_S)
            assert self.is_running, self.output
        except AssertionError:
            print(self.output)
            self.process.kill()
            self.process.wait()
            raise
        self._status_urls = dict(re.findall(r"^(\w+(?:\.\d+)?) +(http://\S+) *$", self.output, re.MULTILINE))

    def stop(self, num_processes: int = 6) -> None:
        """Ctrl-C: everything ends, and nothing is left of at least so many processes."""
        pids = [*_children(self.process.pid), self.process.pid]
        self.openai.close()
        if self.is_running:
            self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
        assert status == 0, self.output
        assert len(pids) >= num_processes, "NATS, router, frontends, workers and serve itself were there to be stopped"
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "every process to end", 5.0)

    # Processes.

    def pid(self, program: str) -> int | None:
        """The process of `program`, as its log file is called; None while there is none."""
        component = program.partition(".")[0]
        marker = {"nats": "nats-server", "frontend": "dynamo.frontend"}.get(component, f"components.{component}")
        port = self._status_urls.get(program, "").rpartition(":")[2]
        for pid, command in _children(self.process.pid).items():
            if marker not in command or "child.py" in command:
                continue
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "worker" not in program or f"DYN_SYSTEM_PORT={port}" in environment:
                return pid
        return None

    def kill(self, program: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a program; its process id."""
        pid = self.pid(program)
        assert pid is not None, f"{program} does not run"
        os.kill(pid, number)
        return pid

    def discovered(self) -> list[str]:
        """The registered endpoints: namespace/component/endpoint/instance."""
        pid = self.pid("frontend")
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        folder = next(value.partition("=")[2] for value in environment if value.startswith("DYN_FILE_KV="))
        return [unquote(file.name) for file in Path(folder, "v1", "instances").iterdir()]

    # Metrics.

    def metrics(self, program: str) -> dict[str, float]:
        """What `program` shows of ours at /metrics, labels in the names; empty while it does not answer."""
        try:
            text = requests.get(f"{self._status_urls[program]}/metrics", timeout=10).text
        except requests.RequestException:
            return {}
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("sangam_"))
        return {name: float(value) for name, _, value in lines}

    def workers(self, component: str = "worker") -> list[str]:
        return sorted(name for name in self._status_urls if component in name)

    def total(self, metric: str, component: str = "worker") -> float:
        """Of a metric without labels, over the workers that answer."""
        return sum(self.metrics(worker).get(f"sangam_worker_{metric}", 0) for worker in self.workers(component))

    def model_is_listed(self) -> bool:
        listed = requests.get(f"{self.url}/v1/models", timeout=10).json()["data"]
        return MODEL_NAME in {entry["id"] for entry in listed}

    def problems(self, num_workers: int) -> list[str]:
        """What is not as in an idle graph with that many workers."""
        problems = []
        router = self.metrics("router")
        if router.get("sangam_router_workers") != num_workers:
            problems.append(f"the router knows {router.get('sangam_router_workers')} workers")
        for name in ("tokens_in_flight", "queued_blocks", "pending_decodes"):
            name = f"sangam_router_{name}"
            if router.get(name) != 0:
                problems.append(f"{name} is {router.get(name)}")
        for name, value in router.items():
            if name.startswith(ACCOUNTS) and value != 0:
                problems.append(f"{name} is {value}")
        for worker in self.workers():
            metrics = self.metrics(worker)
            if not metrics or metrics["sangam_worker_free_pages"] != metrics["sangam_worker_num_pages"]:
                problems.append(f"{worker} holds pages, or does not answer")
            elif any(metrics[f"sangam_worker_num_{what}"] for what in ("waiting", "denoising", "transferring", "held")):
                problems.append(f"{worker} has work")
        # A killed router stays listed until its lease ends, and frontends go on sending it requests.
        routers = [name for name in self.discovered() if "/router/" in name]
        if len(routers) != NUM_ROUTER_ENDPOINTS:
            problems.append(f"discovery lists {routers}")
        if not self.model_is_listed():
            problems.append("the model is not listed")
        return problems

    def wait_until_whole(self, num_workers: int) -> None:
        """Waits until all workers serve and nothing of past requests is left anywhere."""
        deadline = time.monotonic() + PATIENCE_S
        while problems := self.problems(num_workers):
            assert time.monotonic() < deadline, f"{problems}\n{self.output[-4000:]}"
            time.sleep(0.05)

    # Clients.

    def post(self, path: str, body: dict[str, Any], **how: Any) -> requests.Response:
        """As curl would; `how` goes to `requests.post`."""
        how = {"timeout": 90, **how}
        return requests.post(f"{self.url}{path}", json={"model": MODEL_NAME, **body}, **how)

    def chat(self, prompt: str, max_tokens: int = 128, **options: Any) -> dict[str, Any]:
        """A unary chat over plain HTTP: `text`, `finish_reason`, `usage`."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **options}
        reply = self.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        document = reply.json()
        choice = document["choices"][0]
        text = choice["message"]["content"] or ""
        return {"text": text, "finish_reason": choice["finish_reason"], "usage": document["usage"]}

    @contextmanager
    def stream(self, prompt: str, max_tokens: int = 128, **options: Any) -> Iterator[Stream]:
        """A streamed chat over plain HTTP, from its first byte; leaving the block closes the connection."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True, **options}
        with self.post("/v1/chat/completions", body, stream=True) as reply:
            assert reply.status_code == 200, reply.text
            yield Stream(reply)


class Stream:
    """Server-sent events of a chat, read one by one."""

    def __init__(self, reply: requests.Response) -> None:
        self._events = reply.iter_lines(chunk_size=1)
        self.chunks: list[str] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, int] | None = None
        self.errors: list[dict[str, Any]] = []
        self.is_complete = False

    @property
    def text(self) -> str:
        return "".join(self.chunks)

    def read(self) -> bool:
        """One event; False at the end."""
        for line in self._events:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                self.is_complete = True
                return False
            event = json.loads(data)
            if "error" in event:
                self.errors.append(event["error"])
                return True
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    assert self.finish_reason is None, "text after the finish reason"
                    self.chunks.append(choice["delta"]["content"])
                self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.usage = event.get("usage") or self.usage
            return True
        return False

    def read_text(self) -> None:
        """Reads until there is text more than before."""
        num_chunks = len(self.chunks)
        while len(self.chunks) == num_chunks:
            assert self.read(), f"the stream ended: {self.errors or self.text}"

    def read_all(self) -> Stream:
        while self.read():
            pass
        return self


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls made at the same time; the first failure is raised."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
