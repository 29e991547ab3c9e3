from __future__ import annotations

import pytest

from backend.core.counter_random import ORDER, philox, uniform

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
Words = tuple[int, int, int, int]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: Words, key: tuple[int, int], result: Words) -> None:
    assert philox(counter, key) == result


def test_a_number_is_the_first_53_bits_of_its_own_counter_and_key() -> None:
    """By the first and the last of the known answers: the key is the seed's low word, then its high one."""
    assert uniform(0, 0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    counter, key, result = KNOWN_ANSWERS[2]
    seed = key[1] << 32 | key[0]
    assert uniform(seed, *counter) == (result[0] << 32 | result[1]) // 2**11 / 2**53
    assert uniform(seed - 2**64, *counter) == uniform(seed, *counter), "a negative seed counts by its bits"
    assert uniform(0, 0, 0, 0) != uniform(0, 0, 0, 0, stream=ORDER)
