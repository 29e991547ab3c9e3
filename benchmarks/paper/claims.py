"""What the paper states, number by number, from the data file beside this module."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "claims.csv"


@dataclass(frozen=True)
class Claim:
    """Attributes:
    source: section, then figure or table.
    load: requests per second; also a range or a word.
    value: a number; "ordering" where `metric` and `configuration` say who wins; or the paper's word.
    """

    id: str
    source: str
    model: str
    trace: str
    configuration: str
    load: str
    metric: str
    value: str
    unit: str
    note: str

    @property
    def number(self) -> float | None:
        """None where the paper gives no number."""
        try:
            return float(self.value)
        except ValueError:
            return None


def read() -> dict[str, Claim]:
    """By id."""
    with DATA.open(newline="") as file:
        return {row["id"]: Claim(**row) for row in csv.DictReader(file)}
