"""Processes that compute side by side, and are never left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from graphs.child import die_with


@contextmanager
def pool(num_processes: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes that outlive neither the block nor this process, whatever ends it, SIGKILL included.

    What leaves the block by an exception, such as Ctrl-C's, does not wait for what they are doing.

    Args:
        num_processes: None: as many as there are processors.
    """
    others = set(active_children())
    # Not forked: a progress bar has a thread.
    executor = ProcessPoolExecutor(num_processes or os.cpu_count(), get_context("spawn"), _begin, (os.getpid(),))
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - others:
            child.kill()
        raise
    finally:
        executor.shutdown()


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the parent says what then
    die_with(parent)
