from pathlib import Path

from graphs.discovery import forget


def test_only_the_component_of_this_namespace_is_forgotten(tmp_path: Path) -> None:
    kept = ["v1/instances/sangam%2Fcolocated%5Fworker%2Fgenerate%2F1", "v1/mdc/other%2Frouter%2Fgenerate%2F2"]
    gone = ["v1/instances/sangam%2Frouter%2Fgenerate%2F3", "v1/mdc/sangam%2Frouter%2Fgenerate%5Ftensor%2F3"]
    for name in (*kept, *gone):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    forget(str(tmp_path), "sangam", "router")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*2F*")) == sorted(kept)
    forget(str(tmp_path / "absent"), "sangam", "router")
