"""A draw is a pure function of its address, and the addresses of a run stay what they are for ever.

Statistical statements use a fixed seed, so they either hold or not; the tolerance of 4 standard errors (an
event of probability 6e-5 for each) says that a failure means a defect and not bad luck with the seed.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from asyncfed.rng import Streams, chances

_ROUNDS, _MASK = 10, 2**64 - 1


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as in Salmon et al. (2011), in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return [c0, c1, c2, c3]


def word_by_hand(seed: int, stream: str, row: int, index: int, lane: int) -> int:
    def key_word(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    block, place = divmod(index, 4)
    return philox_block((block + 1, row, lane, 0), (key_word(f"seed {seed}"), key_word(f"stream {stream}")))[
        place
    ]


def test_the_hand_written_philox_gives_the_published_known_answer() -> None:
    # Random123's kat_vectors, philox4x64 with 10 rounds, counter and key all zero.
    assert philox_block((0, 0, 0, 0), (0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(-(2**70), 2**70),
    stream=st.text(max_size=8),
    row=st.integers(0, 2**63),
    start=st.integers(0, 2**40),
    length=st.integers(0, 9),
    lane=st.integers(0, 2**63),
)
def test_words_are_philox_of_the_address(
    seed: int, stream: str, row: int, start: int, length: int, lane: int
) -> None:
    words = Streams(seed).words(stream, row, start, start + length, lane)
    assert words.tolist() == [word_by_hand(seed, stream, row, start + k, lane) for k in range(length)]


def test_values_stay_the_same_for_ever() -> None:
    streams = Streams(0)
    assert streams.words("links", 0, 0, 3).tolist() == [
        3044673038864251724,
        13215838159196896472,
        2786702689760949107,
    ]
    assert streams.uniforms("links", 7, 2, 5, lane=1).tolist() == [
        0.23062274990276754,
        0.898835020629151,
        0.7601888588497284,
    ]
    assert streams.seed_for("a", 1, 2) == 6530430825265898861
    assert Streams(12345678901234567890).words("x", 2**40, 0, 2, lane=9).tolist() == [
        10457847253571145803,
        16735278667913351529,
    ]


def test_a_uniform_is_the_top_53_bits_of_its_word() -> None:
    streams = Streams(5)
    words = streams.words("links", 3, 0, 1000)
    assert streams.uniforms("links", 3, 0, 1000).tolist() == [(int(w) >> 11) / 2**53 for w in words]
    assert streams.seed_for("links", 3) == int(words[0]) >> 1
    assert streams.generator("links", 3).random() == streams.generator("links", 3).random()


def test_slices_agree_in_any_order_whatever_else_is_drawn() -> None:
    whole = Streams(1).uniforms("links", 4, 0, 50)
    streams = Streams(1)
    pick = np.random.default_rng(0)
    for _ in range(200):
        start, stop = sorted(pick.integers(0, 51, size=2).tolist())
        streams.uniforms("compute", int(pick.integers(9)), 0, int(pick.integers(1, 9)))
        streams.uniforms("links", int(pick.integers(9)), 3, 8, lane=int(pick.integers(9)))
        assert streams.uniforms("links", 4, start, stop).tolist() == whole[start:stop].tolist()


def test_what_was_drawn_is_not_changed_by_later_draws() -> None:
    streams = Streams(1)
    first = streams.words("links", 0, 0, 8)
    before = first.tolist()
    streams.words("links", 1, 0, 8)
    assert first.tolist() == before


def test_seeds_streams_rows_and_lanes_all_differ() -> None:
    draws = {
        (seed, stream, row, lane): tuple(Streams(seed).words(stream, row, 0, 4, lane).tolist())
        for seed in (-2, -1, 0, 1, 2**61 - 1, 2**64)
        for stream in ("links", "loss", "")
        for row in (0, 1, 2)
        for lane in (0, 1, 2)
    }
    words = [word for words in draws.values() for word in words]
    assert len(set(words)) == len(words) == 6 * 3 * 3 * 3 * 4


def test_uniforms_are_uniform() -> None:
    streams = Streams(2)
    u = np.concatenate([streams.uniforms("links", row, 0, 1000) for row in range(200)])
    assert u.min() >= 0
    assert u.max() < 1
    assert u.mean() == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / len(u)))
    assert stats.kstest(u, "uniform").pvalue > 6e-5
    assert stats.chisquare(np.histogram(u, 256, (0, 1))[0]).pvalue > 6e-5


@pytest.mark.parametrize("neighbour", ["index", "row", "lane", "stream", "seed"])
def test_neighbouring_addresses_are_uncorrelated(neighbour: str) -> None:
    n = 40_000
    here = Streams(3).uniforms("links", 5, 0, n + 1)
    there = {
        "index": here[1:],
        "row": Streams(3).uniforms("links", 6, 0, n),
        "lane": Streams(3).uniforms("links", 5, 0, n, lane=1),
        "stream": Streams(3).uniforms("loss", 5, 0, n),
        "seed": Streams(4).uniforms("links", 5, 0, n),
    }[neighbour]
    assert abs(np.corrcoef(here[:n], there)[0, 1]) < 4 / np.sqrt(n)


def test_one_edge_is_uncorrelated_from_step_to_step() -> None:
    n = 10_000
    streams = Streams(6)
    u = np.array([streams.uniforms("links", row, 17, 18)[0] for row in range(n + 1)])
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 4 / np.sqrt(n)


def test_comparing_words_is_comparing_uniforms() -> None:
    probability = np.array([2.0**-53, 0.1, 1 / 3, 0.5, 0.999999, 1.0] * 500)
    streams = Streams(5)
    for row in range(20):
        expected = streams.uniforms("links", row, 7, 7 + len(probability)) < probability
        assert (streams.below("links", row, 7, chances(probability)) == expected).all()


def test_a_chance_is_the_last_word_whose_uniform_lies_below() -> None:
    for p in (2.0**-53, 0.25, 1 / 3, 0.7, 1.0):
        last = int(chances(np.array([p]))[0])
        assert (last >> 11) * 2.0**-53 < p
        assert last == 2**64 - 1 or ((last + 1) >> 11) * 2.0**-53 >= p
