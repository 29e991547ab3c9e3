from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulator.hardware import gpus, kv_cache_tokens, models
from benchmarks.simulator.latency import Efficiencies, Measured, Roofline


def roofline(model: str = "llada-8b", gpu: str = "h100", overall: float = 1.0, *, all_logits: bool = False) -> Roofline:
    return Roofline(models()[model], gpus()[gpu], Efficiencies(overall), has_all_logits=all_logits)


@pytest.mark.parametrize(
    ("latency", "expected_ms"),
    [
        (roofline(), (7.0, 8.2, 10.7, 16.0, 26.8, 48.8, 93.2)),
        (roofline(overall=0.776), (7.2, 8.5, 11.5, 17.6, 30.1, 55.6, 106.9)),
        (roofline(gpu="h200"), (5.3, 6.4, 8.7, 13.4, 23.1, 42.7, 82.2)),
        (roofline("dream-7b"), (6.3, 7.2, 8.9, 12.6, 20.3, 36.1, 68.0)),
    ],
)
def test_decodes_take_what_the_cost_tables_say(latency: Roofline, expected_ms: tuple[float, ...]) -> None:
    """The groundwork's table: decodes of 1,024 tokens of context."""
    batches = (1, 2, 4, 8, 16, 32, 64)
    found = [latency.step_s((), batch, 1024 * batch) * 1e3 for batch in batches]
    assert found == pytest.approx(expected_ms, abs=0.051)


@pytest.mark.parametrize(
    ("model", "tokens", "needed_ms", "all_ms"),
    [
        ("llada-8b", 1819, 47.6, 50.4),
        ("llada-8b", 3500, 94.4, 100.0),
        ("dream-7b", 1819, 44.3, 47.3),
        ("dream-7b", 3500, 86.6, 92.6),
    ],
)
def test_prefills_take_what_the_cost_tables_say(model: str, tokens: int, needed_ms: float, all_ms: float) -> None:
    assert roofline(model).step_s((tokens,), 0, 0) * 1e3 == pytest.approx(needed_ms, abs=0.051)
    assert roofline(model, all_logits=True).step_s((tokens,), 0, 0) * 1e3 == pytest.approx(all_ms, abs=0.051)


def test_decodes_alone_are_padded_to_the_batch_of_a_cuda_graph() -> None:
    latency = roofline()
    host_s = Efficiencies().request_s
    assert latency.step_s((), 9, 0) + host_s * 7 == pytest.approx(latency.step_s((), 16, 0))
    assert latency.step_s((), 600, 0) > latency.step_s((), 512, 0)
    # With a prefill nothing is padded, but kernels are launched one by one.
    assert latency.step_s((16,), 1, 0) >= Efficiencies().launch_s > latency.step_s((), 2, 0)


def test_decodes_that_compute_more_than_their_block_take_longer() -> None:
    latency, rates = roofline(), Efficiencies()
    one_block, suffix, whole = (latency.step_s((), 2, 2000, tokens) for tokens in (64, 600, 2000))
    assert one_block == latency.step_s((), 2, 2000) < suffix < whole
    # Two that compute all they have are two prefills, but for the KV that these only write.
    assert whole == pytest.approx(latency.step_s((1000, 1000), 0, 0), rel=1e-3)
    # No graph was captured for a few tokens more.
    assert latency.step_s((), 2, 2000, 66) >= rates.launch_s + rates.step_s + 2 * rates.request_s > one_block


def test_memory_bounds_the_kv_cache() -> None:
    assert kv_cache_tokens(models()["llada-8b"], gpus()["h100"], 16) == 99123 // 16 * 16
    assert kv_cache_tokens(models()["dream-7b"], gpus()["h200"], 16) == 1877605 // 16 * 16
    with pytest.raises(ValueError, match="no room for KV"):
        kv_cache_tokens(models()["llada-8b"], gpus()["a100-40gb"].__class__(312, 20, 1.5, 300), 16)


def test_measured_steps_are_joined_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(
        "num_decodes,mean_context,prefill_tokens,seconds\n"
        "1,1000,0,0.010\n1,2000,0,0.012\n3,1000,0,0.014\n3,2000,0,0.020\n0,0,1000,0.030\n0,0,3000,0.090\n"
    )
    latency = Measured(path)
    assert latency.step_s((), 1, 1000) == pytest.approx(0.010)
    assert latency.step_s((), 2, 2 * 1500) == pytest.approx((0.011 + 0.017) / 2)
    assert latency.step_s((), 5, 5 * 1000) == pytest.approx(0.018)
    assert latency.step_s((2000, 500), 0, 0) == pytest.approx(0.075)
    assert latency.step_s((2000,), 3, 3000) == pytest.approx(0.060 + 0.014 - 0.008)
    assert latency.step_s((), 1, 1000, 96) == pytest.approx(0.014), "as three of a block each"


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "num_decodes,mean_context,prefill_tokens,seconds\n1,1000,0,0.01\n"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"profile\.csv"):
        Measured(path)
