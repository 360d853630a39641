"""Partitions: disjoint, seeded, none empty, and as heterogeneous as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.data import (
    CIFAR100_SUPERCLASSES,
    IID,
    Bootstrap,
    DirichletOverClasses,
    DirichletOverClients,
    LabelShards,
    OverlappingDirichlet,
    Pachinko,
    Partition,
    parse_partition,
)
from asyncfed.errors import DataError, UnknownNameError
from asyncfed.rng import Streams

PAIRS = (0, 1, 1, 0, 2, 2, 3, 3, 4, 4)  # coarse labels of ten classes
ALL: list[Partition] = [
    IID(),
    LabelShards(2),
    DirichletOverClients(0.4),
    DirichletOverClasses(0.4),
    Pachinko(0.4, 10, coarse=PAIRS),
]


def labels_of(samples: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(7).integers(0, classes, samples)


def class_table(labels: np.ndarray, shares: list[np.ndarray]) -> np.ndarray:
    return np.array([np.bincount(labels[share], minlength=int(labels.max()) + 1) for share in shares])


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(60, 400),
    clients=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    partition=st.sampled_from(
        [
            IID(),
            LabelShards(2),
            DirichletOverClients(5.0),
            DirichletOverClasses(0.3),
            Pachinko(0.3, 1.0, coarse=PAIRS),
        ]
    ),
)
def test_every_sample_belongs_to_exactly_one_client(
    samples: int, clients: int, seed: int, partition: Partition
) -> None:
    shares = partition.split(labels_of(samples), clients, Streams(seed))
    assert len(shares) == clients
    assert all(len(share) and (np.diff(share) > 0).all() for share in shares)
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(samples))


@pytest.mark.parametrize("partition", [*ALL, OverlappingDirichlet(0.4)], ids=lambda p: type(p).__name__)
def test_a_partition_follows_from_the_seed_alone(partition: Partition) -> None:
    labels = labels_of(500)
    first, again, other = (partition.split(labels, 10, Streams(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_shares_differ_by_at_most_one_sample_and_look_alike() -> None:
    labels = labels_of(10_003)
    shares = IID().split(labels, 10, Streams(0))
    assert {len(share) for share in shares} == {1000, 1001}
    assert abs(class_table(labels, shares) / 1000 - 0.1).max() < 0.04


def test_label_shards_give_each_client_few_labels_in_equal_amounts() -> None:
    labels = np.repeat(np.arange(10), 600)
    shares = LabelShards(2).split(labels, 100, Streams(0))
    assert {len(share) for share in shares} == {60}
    table = class_table(labels, shares)
    assert ((table > 0).sum(1) <= 2).all()
    assert set(table[table > 0]) == {30, 60}


def test_a_small_alpha_over_clients_gives_a_class_to_few() -> None:
    labels = np.repeat(np.arange(10), 1000)
    shares_of_largest = {}
    for alpha in (0.05, 100.0):
        table = class_table(labels, DirichletOverClients(alpha).split(labels, 8, Streams(1)))
        shares_of_largest[alpha] = (table.max(0) / table.sum(0)).mean()
    assert shares_of_largest[0.05] > 0.6
    assert shares_of_largest[100.0] < 0.2


def test_dirichlet_over_clients_has_the_variance_of_its_distribution() -> None:
    n, alpha = 20, 0.7
    labels = np.repeat(np.arange(100), 1000)
    proportions = class_table(labels, DirichletOverClients(alpha).split(labels, n, Streams(2))) / 1000
    # A component of a symmetric Dirichlet has variance (1/n)(1 − 1/n)/(nα + 1).
    expected = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    assert proportions.mean() == pytest.approx(1 / n)
    assert proportions.var() == pytest.approx(expected, rel=0.15)


def test_dirichlet_over_classes_gives_everybody_the_same_number_of_samples() -> None:
    labels = labels_of(5000)
    shares = DirichletOverClasses(0.1, samples=40).split(labels, 50, Streams(0))
    assert {len(share) for share in shares} == {40}
    assert len(np.unique(np.concatenate(shares))) == 2000
    table = class_table(labels, shares)
    assert (table.max(1) / 40).mean() > 0.6
    even = class_table(labels, DirichletOverClasses(1000.0, samples=40).split(labels, 50, Streams(0)))
    assert (even.max(1) / 40).mean() < 0.3


def test_dirichlet_over_classes_goes_on_with_what_is_left_when_classes_run_out() -> None:
    labels = np.array([0] * 5 + [1] * 95)
    shares = DirichletOverClasses(0.01).split(labels, 7, Streams(0))
    assert sorted(len(share) for share in shares) == [14, 14, 14, 14, 14, 15, 15]
    assert len(np.unique(np.concatenate(shares))) == 100


def test_min_samples_redraws_until_it_holds() -> None:
    labels = labels_of(400)
    sizes = [len(s) for s in DirichletOverClients(0.3).split(labels, 10, Streams(12))]
    enough = [len(s) for s in DirichletOverClients(0.3, min_samples=15).split(labels, 10, Streams(12))]
    assert min(sizes) < 15 <= min(enough)


def test_a_client_that_stays_empty_is_named_with_a_remedy() -> None:
    labels = np.zeros(30, dtype=np.int64)
    with pytest.raises(DataError, match=r"client \d+ got 0 samples.*larger alpha, fewer clients"):
        DirichletOverClients(0.01).split(labels, 20, Streams(0))


@pytest.mark.parametrize("partition", ALL, ids=lambda p: type(p).__name__)
def test_more_clients_than_samples_are_refused(partition: Partition) -> None:
    with pytest.raises(DataError, match="11 clients with at least 1 samples each need 11, there are 10"):
        partition.split(labels_of(10), 11, Streams(0))
    with pytest.raises(DataError, match="clients is 0"):
        partition.split(labels_of(10), 0, Streams(0))


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        DataError, match="DirichletOverClients: alpha is 0; it must be a finite number above 0"
    ):
        DirichletOverClients(0)
    with pytest.raises(DataError, match=r"DirichletOverClasses: alpha is -1"):
        DirichletOverClasses(-1.0)
    with pytest.raises(DataError, match="per_client is 0"):
        LabelShards(0)
    with pytest.raises(DataError, match="samples is 0"):
        DirichletOverClasses(1.0, samples=0)
    with pytest.raises(DataError, match="min_samples is 0"):
        DirichletOverClients(1.0, min_samples=0)
    with pytest.raises(DataError, match="6 clients with 2 shards each need 12 samples, there are 10"):
        LabelShards(2).split(labels_of(10), 6, Streams(0))
    with pytest.raises(DataError, match="4 clients with at least 3 samples each need 12, there are 10"):
        DirichletOverClasses(1.0, samples=3).split(labels_of(10), 4, Streams(0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iid", IID()),
        ("shards", LabelShards(2)),
        ("shards:3", LabelShards(3)),
        ("dirichlet:0.4", DirichletOverClients(0.4)),
        ("dirichlet-classes:0.01", DirichletOverClasses(0.01)),
        ("dirichlet-classes:0.01,40", DirichletOverClasses(0.01, samples=40)),
        ("dirichlet-overlapping:0.01", OverlappingDirichlet(0.01)),
        ("pachinko:0.4,10", Pachinko(0.4, 10)),
        ("pachinko:0.4,10,2500", Pachinko(0.4, 10, samples=2500)),
        ("dirichlet-overlapping:0.01,1000", OverlappingDirichlet(0.01, samples=1000)),
    ],
)
def test_partitions_can_be_written_as_text(text: str, expected: Partition) -> None:
    assert parse_partition(text) == expected


def test_a_text_that_names_no_partition_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown partition 'dirichet'; did you mean 'dirichlet'"):
        parse_partition("dirichet:0.4")
    with pytest.raises(DataError, match="'' is not understood; write for instance 'dirichlet:0"):
        parse_partition("dirichlet")
    with pytest.raises(DataError, match="DirichletOverClients: alpha is -1"):
        parse_partition("dirichlet:-1")
    with pytest.raises(DataError, match="'x' is not understood; write for instance 'shards:2'"):
        parse_partition("shards:x")
    with pytest.raises(DataError, match=r"'0\.1,x' is not understood"):
        parse_partition("dirichlet-overlapping:0.1,x")
    for text in ("pachinko", "pachinko:0.4", "pachinko:0.4,x", "pachinko:0.4,10,5,6", "pachinko:0.4,10,"):
        with pytest.raises(DataError, match=r"is not understood; write for instance 'pachinko:0\.4,10'"):
            parse_partition(text)
    with pytest.raises(DataError, match="'3' is not expected; write just 'iid'"):
        parse_partition("iid:3")


def test_bootstrap_deals_more_samples_than_there_are_and_uniformly() -> None:
    """Each of 50 samples is drawn 400 times on average by 2,000 clients of 10: within 5 standard errors, for
    50 counts.
    """
    labels = np.zeros(50, dtype=np.int64)
    shares = Bootstrap(10).split(labels, 2000, Streams(3))
    assert [len(share) for share in shares] == [10] * 2000
    counts = np.bincount(np.concatenate(shares), minlength=50)
    assert (np.abs(counts - 400) < 5 * np.sqrt(20_000 * 0.02 * 0.98)).all()
    assert parse_partition("bootstrap:10") == Bootstrap(10)
    with pytest.raises(DataError, match="samples is 0"):
        Bootstrap(0)


def test_overlapping_clients_draw_without_regard_to_each_other_and_none_twice() -> None:
    labels = np.repeat(np.arange(10), 500)
    shares = OverlappingDirichlet(0.01, samples=100).split(labels, 50, Streams(0))
    assert all(len(share) == 100 and (np.diff(share) > 0).all() for share in shares)
    assert len(np.unique(np.concatenate(shares))) < 5000  # 50·100, were they disjoint
    table = class_table(labels, shares)
    assert np.median(table.max(1)) == 100  # Dirichlet(0.01): nearly everything is one class
    fewer = OverlappingDirichlet(0.01, samples=100).split(labels, 7, Streams(0))
    assert all(map(np.array_equal, shares[:7], fewer))
    alone = OverlappingDirichlet(0.01).split(labels, 50, Streams(0))  # as many as would go around
    assert all(map(np.array_equal, shares, alone))


def test_overlapping_class_distributions_have_the_variance_of_theirs() -> None:
    classes, alpha, each = 10, 0.7, 200
    labels = np.repeat(np.arange(classes), 1000)
    shares = OverlappingDirichlet(alpha, samples=each).split(labels, 2000, Streams(5))
    proportions = class_table(labels, shares) / each
    # Dirichlet-multinomial: p(1 − p)(1 + (n − 1)/(Cα + 1))/n with p = 1/C.
    p = 1 / classes
    expected = p * (1 - p) * (1 + (each - 1) / (classes * alpha + 1)) / each
    assert proportions.mean(0) == pytest.approx(np.full(classes, p), abs=5 * np.sqrt(expected / 2000))
    assert proportions.var() == pytest.approx(expected, rel=0.05)


def test_every_sample_of_a_class_is_as_likely_for_an_overlapping_client() -> None:
    """Each of 40 alike is drawn by 1,000 clients with probability ¼: 250 ± 5·13.7 times."""
    shares = OverlappingDirichlet(1.0, samples=10).split(np.zeros(40, dtype=np.int64), 1000, Streams(2))
    counts = np.bincount(np.concatenate(shares), minlength=40)
    assert (np.abs(counts - 250) < 5 * np.sqrt(1000 * 0.25 * 0.75)).all()


def test_an_overlapping_client_that_has_all_of_a_class_goes_on_with_another() -> None:
    labels = np.repeat(np.arange(3), [20, 20, 60])
    for share in OverlappingDirichlet(0.001, samples=70).split(labels, 20, Streams(0)):
        table = np.bincount(labels[share], minlength=3)
        assert table.sum() == len(np.unique(share)) == 70
        assert (table <= [20, 20, 60]).all()
    everything = OverlappingDirichlet(0.1, samples=100).split(labels, 2, Streams(0))
    assert [share.tolist() for share in everything] == [list(range(100))] * 2


def test_overlapping_clients_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(DataError, match="11 samples for each client, none twice, cannot be drawn from 10"):
        OverlappingDirichlet(1.0, samples=11).split(labels_of(10), 3, Streams(0))
    with pytest.raises(DataError, match="11 clients with at least 1 samples each need 11, there are 10"):
        OverlappingDirichlet(1.0).split(labels_of(10), 11, Streams(0))
    with pytest.raises(DataError, match="more than 268,435,456"):
        OverlappingDirichlet(1.0, samples=10).split(labels_of(10), 2**28, Streams(0))
    with pytest.raises(DataError, match="OverlappingDirichlet: alpha is 0"):
        OverlappingDirichlet(0)


def test_pachinko_has_the_variances_of_both_its_distributions() -> None:
    alpha, beta, each, clients = 0.7, 3.0, 200, 400
    labels = np.tile(np.arange(100), 20_000)
    shares = Pachinko(alpha, beta, samples=each).split(labels, clients, Streams(0))
    table = class_table(labels, shares)
    coarse = np.zeros((clients, 20))
    np.add.at(coarse.T, np.array(CIFAR100_SUPERCLASSES), table.T)

    def variance(kinds: int, rate: float, n: np.ndarray) -> np.ndarray:
        """Of a proportion among n samples: Dirichlet-multinomial."""
        return (1 / kinds) * (1 - 1 / kinds) * (1 + (n - 1) / (kinds * rate + 1)) / n

    assert (coarse / each).var() == pytest.approx(variance(20, alpha, np.array(each)), rel=0.07)
    drawn = coarse[:, np.array(CIFAR100_SUPERCLASSES)]  # of each label's coarse one, by the same client
    many = drawn >= 20
    squares = (table[many] / drawn[many] - 1 / 5) ** 2
    assert squares.mean() == pytest.approx(variance(5, beta, drawn[many]).mean(), rel=0.07)


def test_pachinko_takes_another_of_the_same_coarse_label_first() -> None:
    """Against what Reddi et al. (2021) do, sample by sample: two coarse labels with two fine ones each, of
    which one is nearly used up.
    """
    sizes, amount, draws = np.array([1, 9, 10, 10]), 12, 1500
    generator = np.random.default_rng(0)
    literal = np.zeros((draws, 4))
    for counts in literal:
        for _ in range(amount):
            some = [pair for pair in ((0, 1), (2, 3)) if (counts[[*pair]] < sizes[[*pair]]).any()]
            pair = some[generator.integers(len(some))]
            there = [fine for fine in pair if counts[fine] < sizes[fine]]
            counts[there[generator.integers(len(there))]] += 1
    labels = np.repeat(np.arange(4), sizes)
    even = Pachinko(1e7, 1e7, samples=amount, coarse=(0, 0, 1, 1))
    found = np.concatenate(
        [class_table(labels, even.split(labels, 1, Streams(seed))) for seed in range(draws)]
    )
    errors = np.sqrt((literal.var(0) + found.var(0)) / draws) + 1e-12
    assert (np.abs(literal.mean(0) - found.mean(0)) < 4 * errors).all()
    assert found.mean(0) == pytest.approx([1, 5, 3, 3], abs=0.2)  # over all that is left: [1, 3.7, …]
    assert found.var(0) == pytest.approx(literal.var(0), rel=0.15, abs=0.02)


def test_pachinko_needs_to_know_the_coarse_labels() -> None:
    for classes in (10, 62):
        labels = labels_of(3000, classes)
        with pytest.raises(DataError, match=f"go up to {classes - 1}, so they are not those of CIFAR-100"):
            Pachinko(0.4, 10).split(labels, 3, Streams(0))
    with pytest.raises(DataError, match="coarse has 9 values, and the labels go up to 9; give the coarse"):
        Pachinko(0.4, 10, coarse=PAIRS[:9]).split(labels_of(300), 3, Streams(0))
    with pytest.raises(DataError, match="Pachinko: beta is 0"):
        Pachinko(0.4, 0)
    with pytest.raises(DataError, match=r"Pachinko: coarse\[1\] is -1"):
        Pachinko(0.4, 10, coarse=(0, -1))
