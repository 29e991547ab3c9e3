"""What file discovery still says of a process that was killed.

Its entries would stay for the ten seconds of its lease. For a worker that is no matter, since the
router notices by itself; to a dead router the frontends would go on sending requests.
"""

from __future__ import annotations

from pathlib import Path


def forget(discovery_dir: str, namespace: str, component: str) -> None:
    """Removes all entries of `component`, of which no instance may be running.

    Knows where Dynamo 1.4 keeps them: DIR/v1/KIND/NAMESPACE%2FCOMPONENT%2FENDPOINT%2FINSTANCE.
    """
    for entry in Path(discovery_dir).glob(f"v1/*/{namespace}%2F{component}%2F*"):
        entry.unlink(missing_ok=True)
