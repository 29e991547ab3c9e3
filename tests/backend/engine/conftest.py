"""A table at the end of a test run: how many of the reference code's cases came out the same."""

from __future__ import annotations

from collections import defaultdict

import pytest

_PROPERTY = "case of the reference code"


class GoldenTable:
    """Collects (same tokens, same number of forwards) by model, cache, strategy and remark.

    They travel with the test's report: it may have run in another process than the one that prints.
    """

    def __init__(self, test: pytest.Item) -> None:
        self._properties = test.user_properties

    def compare(
        self, model: str, cache: str, strategy: str, remark: str, *, tokens: bool, forwards: bool, case: str
    ) -> None:
        """Notes one case and fails the test that it belongs to if it is not the same."""
        self._properties.append((_PROPERTY, ((model, cache, strategy, remark), (tokens, forwards))))
        assert tokens, f"{case}: other tokens"
        assert forwards, f"{case}: other number of forwards"


@pytest.fixture
def golden_table(request: pytest.FixtureRequest) -> GoldenTable:
    return GoldenTable(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[tuple[str, ...], list[tuple[bool, bool]]] = defaultdict(list)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties if report.when == "call" else ():
                if name == _PROPERTY:
                    row, same = value
                    rows[tuple(row)].append(same)
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section("cases of the reference code")
    write(f"{'model':12} {'cache':12} {'strategy':22} {'runs':>5} {'tokens':>7} {'forwards':>9}")
    for (model, cache, strategy, remark), outcomes in sorted(rows.items()):
        tokens, forwards = (sum(column) for column in zip(*outcomes, strict=True))
        write(f"{model:12} {cache:12} {strategy:22} {len(outcomes):5} {tokens:7} {forwards:9}  {remark}".rstrip())
