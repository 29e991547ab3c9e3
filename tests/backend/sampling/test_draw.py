import torch

from backend.sampling.draw import sample, top_probability
from backend.sampling.seeds import uniform


def counters(n: int, seed: int = 1) -> list[torch.Tensor]:
    return [
        torch.full((n,), seed),
        torch.zeros(n, dtype=torch.int64),
        torch.zeros(n, dtype=torch.int64),
        torch.arange(n),
    ]


def test_top_probability_is_the_softmax_of_the_arg_max() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, -torch.inf]])
    torch.testing.assert_close(top_probability(logits), torch.tensor([0.66524, 0.5]), atol=1e-5, rtol=0)


def test_top_probability_of_broken_rows_is_nan() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 1] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    assert top_probability(logits).isnan().tolist() == [True, True, True, False]


def test_uniform_depends_on_every_counter_and_only_on_them() -> None:
    base = [torch.tensor([i]) for i in (7, 3, 2, 9)]
    value = uniform(*base)
    assert torch.equal(value, uniform(*base))
    seen = {value.item()}
    for i in range(4):
        for delta in (1, 1 << 31, -5):
            changed = list(base)
            changed[i] = base[i] + delta
            seen.add(uniform(*changed).item())
    assert len(seen) == 13
    batch = [torch.cat((torch.tensor([1, 2]), x)) for x in base]
    assert uniform(*batch)[2] == value[0]


def test_uniform_is_uniform() -> None:
    values = uniform(*counters(200_000))
    assert 0 <= values.min() and values.max() < 1
    share = torch.histc(values.float(), 20, 0, 1) / len(values)
    assert (share - 0.05).abs().max() < 0.003


def test_sample_follows_the_tempered_distribution_and_reports_the_plain_probability() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    n = 100_000
    token, confidence = sample(logits.expand(n, -1), torch.full((n,), 0.5, dtype=torch.float64), counters(n))
    share = torch.bincount(token, minlength=4) / n
    torch.testing.assert_close(share, (logits / 0.5).softmax(0), atol=0.01, rtol=0)
    torch.testing.assert_close(confidence, logits.softmax(0)[token])


def test_a_tiny_temperature_is_argmax() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    token, _ = sample(logits, torch.full((64,), 1e-6, dtype=torch.float64), counters(64))
    assert torch.equal(token, logits.argmax(-1))
