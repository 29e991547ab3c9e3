"""Becomes a program that cannot outlive its parent: `python child.py PARENT_PID PROGRAM [ARGUMENT ...]`.

The kernel kills the program when the parent is gone, however it went. A program of its own, because
code run between fork and exec is unsafe as soon as the parent has threads. Processes that the
program starts itself are not covered.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: becomes the program, or exits 127 if there is no such program."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    die_with(parent)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread of `parent` that started it is gone.

    Raises SystemExit if it is gone already.
    """
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before prctl, whose signal would never come
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    main()
