from hypothesis import given
from hypothesis import strategies as st

from backend.core.budget import TokenBudget

BUDGETS = st.integers(1, 4096)
STEPS = st.lists(st.tuples(st.integers(0, 2048), st.lists(st.integers(1, 6000), max_size=3)), min_size=1, max_size=40)


def room(_: int) -> bool:
    return True


def test_paper_figure_6_carries_the_unspent_budget_until_a_large_prefill_fits() -> None:
    budget = TokenBudget(100)
    assert budget.admit(40, [50, 120], room) == 1
    assert budget.deficit == 10
    assert budget.admit(40, [120], room) == 0
    assert budget.deficit == 70
    assert budget.admit(40, [120], room) == 1
    assert budget.deficit == 10


def test_no_waiting_prefill_clears_the_deficit() -> None:
    budget = TokenBudget(100)
    budget.admit(40, [500], room)
    assert budget.deficit == 60
    assert budget.admit(40, [], room) == 0
    assert budget.deficit == 0


def test_an_idle_worker_admits_an_oversized_head_alone() -> None:
    budget = TokenBudget(100)
    assert budget.admit(0, [500, 10], room) == 1
    assert budget.deficit == 0


def test_the_first_that_does_not_fit_stops_the_scan() -> None:
    assert TokenBudget(100).admit(10, [95, 5], room) == 0


def test_decodes_over_the_budget_leave_no_debt() -> None:
    budget = TokenBudget(100)
    assert budget.admit(300, [50], room) == 0
    assert budget.deficit == 0


def test_a_step_stopped_by_pages_does_not_earn_its_allowance() -> None:
    budget = TokenBudget(100)
    for _ in range(50):
        assert budget.admit(40, [20], lambda _: False) == 0
        assert budget.deficit == 0
    budget.admit(40, [500], room)
    assert budget.deficit == 60
    assert budget.admit(40, [20, 30], lambda i: i == 0) == 1
    assert budget.deficit == 60


def test_the_deficit_does_not_run_away_while_every_prefill_is_admitted_at_once() -> None:
    budget = TokenBudget(100)
    for _ in range(1000):
        assert budget.admit(10, [5], room) == 1
    assert budget.deficit == 105


def test_decodes_over_the_budget_eat_what_was_saved() -> None:
    budget = TokenBudget(100)
    budget.admit(40, [500], room)
    assert budget.admit(120, [500], room) == 0
    assert budget.deficit == 40


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 8000), st.integers(1, 9000))
def test_with_a_least_allowance_no_decodes_starve_a_prefill(tau: int, least: int, size: int, decodes: int) -> None:
    budget = TokenBudget(tau, least)
    bound = -(-size // max(tau - decodes, least))
    steps = 1
    while budget.admit(decodes, [size], room) == 0:
        steps += 1
        assert steps <= bound
    assert steps == bound


@given(BUDGETS, STEPS)
def test_bounds_hold_while_prefills_wait(tau: int, steps: list[tuple[int, list[int]]]) -> None:
    """Over any window of steps with prefills waiting, decodes running and no debt forgiven."""
    budget = TokenBudget(tau)
    queue: list[int] = []
    window_prefill, window_decode, window = 0, 0, 0
    for decode_tokens, arrivals in steps:
        queue += arrivals
        admitted = budget.admit(decode_tokens, queue, room)
        assert 0 <= budget.deficit <= max(queue, default=0) + tau
        if not queue or decode_tokens == 0 or decode_tokens > tau:
            window_prefill = window_decode = window = 0
            # The window starts from a clean account: what was earned before it is not its own.
            budget.deficit = 0
        else:
            window += 1
            window_prefill += sum(queue[:admitted])
            window_decode += decode_tokens
            assert window_prefill <= window * tau - window_decode
        del queue[:admitted]


@given(st.integers(1, 2000), st.integers(1, 8000), st.integers(0, 1999))
def test_every_prefill_is_admitted_within_a_bounded_number_of_steps(tau: int, size: int, decodes: int) -> None:
    decodes = min(decodes, tau - 1)
    budget = TokenBudget(tau)
    bound = -(-size // (tau - decodes))
    steps = 1
    while budget.admit(decodes, [size], room) == 0:
        steps += 1
        assert steps <= bound
