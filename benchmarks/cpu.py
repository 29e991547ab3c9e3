"""Who used the machine's processors, from /proc (Linux): a measured graph, and everybody else."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
KINDS = {
    "components.prefill_worker": "prefill workers",
    "components.colocated_worker": "colocated workers",
    "components.router": "router",
    "dynamo.frontend": "frontend",
    "nats-server": "NATS",
}
"""What a command line holds -> whose it is."""


def num_cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0))


def busy_s() -> float:
    """CPU seconds all processors together have worked since the machine started."""
    fields = [int(value) for value in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) / TICKS_PER_S


def used_s(parent: int) -> dict[str, float]:
    """CPU seconds of a graph's running processes, by kind; `serve` itself is "other".

    Args:
        parent: process id of `sangam serve`.
    """
    used: dict[str, float] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if parent in (int(entry.name), int(fields[1])):
            kind = next((kind for marker, kind in KINDS.items() if marker in command), "other")
            used[kind] = used.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return used
