"""What other threads ask of the one that owns something."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Mailbox:
    """Commands for one thread, carried out in order; every command accepted is carried out."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_open = True
        self._lock = threading.Lock()

    def put(self, command: Callable[[], None]) -> bool:
        """False: closed, and the command is dropped."""
        with self._lock:
            if self._is_open:
                self._commands.put(command)
            return self._is_open

    def close(self) -> None:
        """Accepts nothing more. Idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._commands.put(None)

    def work(self, timeout_s: float | None) -> bool:
        """Carries out what is there, after waiting for the first command: for ever if `timeout_s` is None.

        Returns:
            False at the end: closed and empty.
        """
        try:
            command = self._commands.get(timeout=timeout_s)
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False
