from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.paper.__main__ import main  # noqa: E402


def test_a_figure_and_its_claims_twice_the_same(tmp_path: Path) -> None:
    written = []
    for run in ("one", "other"):
        asked = ["--figures", "3,5", "--seeds", "1", "--num-requests", "12", "--processes", "1"]
        assert main([*asked, "--cache", str(tmp_path / run), "--out", str(tmp_path / f"{run}.out")]) == 0
        written.append({file.name: file.read_bytes() for file in (tmp_path / f"{run}.out").iterdir()})
    assert written[0] == written[1]
    files = written[0]
    assert sorted(files) == ["figure3.png", "figure5.png", "report.md"]
    assert all(files[f"figure{at}.png"].startswith(b"\x89PNG") for at in (3, 5))
    assert max(map(len, files.values())) < 150_000
    text = files["report.md"].decode()
    assert sum(line.startswith("| C") and "| not run |" in line for line in text.splitlines()) > 50
    assert "holds in" in next(line for line in text.splitlines() if line.startswith("| C155 | 3.3"))


def test_a_figure_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--figures", "4", "--out", str(tmp_path)])
    assert "no figure 4" in capsys.readouterr().err
