from __future__ import annotations

import io

import pytest
from rich.console import Console

from components import generate_progress
from components.generate_progress import GenerateProgress, Totals

TOTALS = Totals(num_answers=30, num_failures=2, num_tokens=3000, num_steps=20, num_forwards=400, seconds=1.5)


class Time:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(generate_progress, "time", made)
    return made


def test_the_summary() -> None:
    assert TOTALS.summary() == (
        "32 requests, 2 failed; 3,000 tokens returned in 1.50 s: "
        "2,000 tokens/s, 7.50 tokens/forward, 20.0 requests/step"
    )
    assert Totals().summary().startswith("0 requests, 0 failed; 0 tokens returned in 0.00 s: 0 tokens/s, 0.00 ")


@pytest.mark.parametrize(("num_requests", "of"), [(90, "/90"), (None, "")])
def test_without_a_terminal_it_is_a_line_every_ten_seconds(time: Time, num_requests: int | None, of: str) -> None:
    out = io.StringIO()
    with GenerateProgress(num_requests, 8, Console(file=out, soft_wrap=True)) as progress:
        for time.now in (109.0, 110.5, 111.0, 119.0, 121.0):
            progress.update(TOTALS)
    line = f"40{of} answers, 2,000 tokens/s, 7.50 tokens/forward, 2 failed\n"
    assert out.getvalue() == line * 2


def test_on_a_terminal_it_is_a_bar(time: Time) -> None:
    out = io.StringIO()
    with GenerateProgress(90, 8, Console(file=out, force_terminal=True, width=120)) as progress:
        time.now = 101.0
        progress.update(TOTALS)
        progress.say("done")
    assert "40/90" in out.getvalue() and "2,000 tokens/s" in out.getvalue() and "done" in out.getvalue()
