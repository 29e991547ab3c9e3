"""A table at the end of a test run: how many of the reference code's cases came out the same."""

from __future__ import annotations

from collections import defaultdict

import pytest

Row = tuple[str, str, str, str]
_KEY = pytest.StashKey[dict[Row, list[tuple[bool, bool]]]]()


class GoldenTable:
    """Collects (same tokens, same number of forwards) by model, cache, strategy and remark."""

    def __init__(self, config: pytest.Config) -> None:
        self._rows = config.stash.setdefault(_KEY, defaultdict(list))

    def compare(
        self, model: str, cache: str, strategy: str, remark: str, *, tokens: bool, forwards: bool, case: str
    ) -> None:
        """Notes one case and fails the test that it belongs to if it is not the same."""
        self._rows[model, cache, strategy, remark].append((tokens, forwards))
        assert tokens, f"{case}: other tokens"
        assert forwards, f"{case}: other number of forwards"


@pytest.fixture
def golden_table(pytestconfig: pytest.Config) -> GoldenTable:
    return GoldenTable(pytestconfig)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_KEY, None)
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section("cases of the reference code")
    write(f"{'model':12} {'cache':12} {'strategy':22} {'runs':>5} {'tokens':>7} {'forwards':>9}")
    for (model, cache, strategy, remark), outcomes in sorted(rows.items()):
        tokens, forwards = (sum(column) for column in zip(*outcomes, strict=True))
        write(f"{model:12} {cache:12} {strategy:22} {len(outcomes):5} {tokens:7} {forwards:9}  {remark}".rstrip())
