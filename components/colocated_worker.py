"""The colocated worker: prefills and denoises blocks under the deficit token budget (paper section 4.1)."""

from __future__ import annotations

from components.config import ColocatedWorkerConfig, from_command_line
from components.runtime import run
from components.worker import Worker


def main() -> None:
    config = from_command_line("colocated_worker", ColocatedWorkerConfig)
    run(Worker(config, "colocated_worker").main, config)


if __name__ == "__main__":
    main()
