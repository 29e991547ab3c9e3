from __future__ import annotations

from pathlib import Path

from graphs.follower import Follower, tail


def test_lines_are_handed_on_once_and_whole(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    follower = Follower(tmp_path, lambda name, line: seen.append((name, line)))
    log = tmp_path / "router.log"
    log.write_bytes(b"one\ntw")
    follower.poll()
    assert seen == [("router", "one")]
    with log.open("ab") as file:
        file.write(b"o\nthree \xff\n")
    follower.poll()
    follower.poll()
    assert seen == [("router", "one"), ("router", "two"), ("router", "three �")]


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert tail(log, 2) == []
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert tail(log, 2) == ["line 998", "line 999"]
