"""What keeps the laws: a method of one's own that breaks one is stopped, and told what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from asyncfed import Scenario, run
from asyncfed.errors import DivergenceError, RunError, ScenarioError
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.fed_inn import PlainInnerSteps
from asyncfed.protocols.part import AmongPeers, Inbox, Judged, Part, Reports, Sizes, Start, Step, Tensors
from asyncfed.protocols.rounds import LEVELS, Answer, Round
from asyncfed.rng import Streams
from tests.laws.examples import Example, Kind, every_kind, two_levels

Fault = Callable[[Inbox, Tensors, Step], Step]


# --- among peers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counting(SGP):
    """SGP that counts its steps in its memory; `fault` is what it does wrong."""

    fault: Fault = lambda inbox, memory, made: made

    def start(self, at: At, carried: Tensors) -> Start:
        opening = super().start(at, carried)
        return Start(opening.absorbed, {**opening.memory, "count": carried["inner"].new_zeros(at.n, 1)})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        made = super().step(at, inbox, memory)
        return self.fault(inbox, memory, replace(made, memory={"count": memory["count"] + 1}))

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return {**super().finish(at, inbox, memory), "count": memory["count"]}


def _in_place(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    memory["count"].add_(1)
    return replace(made, memory={})


def _in_its_place(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    memory["count"] = memory["count"] + 1
    return replace(made, memory={})


def _something_new(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, memory={"more": memory["count"]})


def _sends_more(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, payload={**made.payload, "count": memory["count"]})


def _sends_less(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, payload={"z": made.payload["z"]})


def _sends_longer(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, payload={**made.payload, "omega": made.payload["z"]})


def _sends_one_row(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, payload={**made.payload, "z": made.payload["z"].mean(0)})


def _keeps_more(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, residue={**made.residue, "count": memory["count"]})


def _reads_memory(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, report={"loss": memory["momentum"][:, 0]})


def _reads_messages(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, report={"loss": inbox["momentum"][:, 0]})


def _looks_closer(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, report={"loss": inbox.each("z").values[:, 0]})


def _sends_numpy(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    other: Any = made.payload["z"].numpy()
    return replace(made, payload={**made.payload, "z": other})


def _sends_a_mean(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, payload={**made.payload, "z": made.payload["z"].mean(0)})


def _remembers_longer(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, memory={"count": made.payload["z"]})


def _reports_rows(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    return replace(made, report={"loss": made.payload["z"]})


def _reports_a_number(inbox: Inbox, memory: Tensors, made: Step) -> Step:
    other: Any = 0.5
    return replace(made, report={"loss": other})


def _returns_its_payload(inbox: Inbox, memory: Tensors, made: Step) -> Any:
    return made.payload


AMONG_PEERS: dict[Fault, str] = {
    _sends_numpy: r"Counting sends 'z' as a ndarray; it must be a tensor of shape \(\d, 3\)",
    _sends_a_mean: r"Counting sends 'z' as a tensor of shape \(3,\); it must be a tensor of shape \(\d, 3\)",
    _remembers_longer: r"Counting remembers 'count' as a tensor of shape \(\d, 3\); .* \(\d, 1\)",
    _reports_rows: r"Counting reports 'loss' as a tensor of shape \(\d, 3\); .* one number for each client",
    _reports_a_number: "Counting reports 'loss' as a float",
    _returns_its_payload: r"step of Counting returned a dict; it must return Step\(…\)",
    _in_place: "a step of Counting changed 'count' of its memory in place",
    _in_its_place: "a step of Counting changed 'count' of its memory in place",
    _something_new: "Counting remembers more, but",
    _sends_more: r"Counting sends z \(3\), omega \(1\), count \(1\), but declares z \(3\), omega \(1\)",
    _sends_less: r"Counting sends z \(3\), but declares z \(3\), omega \(1\)",
    _sends_longer: r"Counting sends 'omega' as a tensor of shape \(\d, 3\); it must be .* \(\d, 1\)",
    _sends_one_row: r"Counting sends 'z' as a tensor of shape \(3,\); it must be",
    _keeps_more: r"Counting keeps z \(3\), count \(1\), but declares z \(3\), omega \(1\)",
    _reads_memory: "Counting reads 'momentum', which it does not declare; it declares lam, count",
    _reads_messages: "Counting reads 'momentum', which it does not declare; it declares z, omega",
    _looks_closer: "Counting looks at single messages of 'z'; name it in the part's `each`",
}


@every_kind
@pytest.mark.parametrize("strict", [False, True])
def test_a_part_that_keeps_the_rules_runs(kind: Kind, strict: bool, tmp_path: Path) -> None:
    final = run(_peers(Counting(5, 0.1), kind), out=tmp_path / "run", strict=strict).final
    assert final["count"].flatten().tolist() == [5.0] * 4


@every_kind
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fault", AMONG_PEERS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_part_that_breaks_a_rule_is_stopped(fault: Fault, kind: Kind, strict: bool, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=AMONG_PEERS[fault]):
        run(_peers(Counting(5, 0.1, fault=fault), kind), out=tmp_path / "run", strict=strict)


@dataclass(frozen=True)
class Centring(SGP):
    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        at.batch[0].sub_(1.0)
        return super().step(at, inbox, memory)


@every_kind
def test_samples_are_not_changed(kind: Kind, tmp_path: Path) -> None:
    run(_peers(Centring(5, 0.1, batch=2), kind), out=tmp_path / "own")  # a minibatch is a copy
    with pytest.raises(RunError, match="a step of Centring changed its samples in place"):
        run(_peers(Centring(5, 0.1, batch=None), kind), out=tmp_path / "all")


@dataclass(frozen=True)
class OpensMore(SGP):
    def start(self, at: At, carried: Tensors) -> Start:
        opening = super().start(at, carried)
        return Start({**opening.absorbed, "v": opening.absorbed["z"]}, opening.memory)


@every_kind
def test_a_part_that_starts_with_what_it_does_not_declare_is_stopped(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"OpensMore starts with z \(3\), omega \(1\), v \(3\), but declares"):
        run(_peers(OpensMore(3, 0.1), kind), out=tmp_path / "run")


@dataclass(frozen=True)
class Opposite(SGP):
    """Every other function returns something else than it should."""

    function: str = "start"

    def start(self, at: At, carried: Tensors) -> Any:
        return carried if self.function == "start" else super().start(at, carried)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Any:
        judged = super().judge(at, inbox, memory)
        if self.function == "shorter judge":
            return Judged(judged.inner[:, :2], judged.outer)
        return judged.inner if self.function == "judge" else judged

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Any:
        left = super().finish(at, inbox, memory)
        if self.function == "shorter finish":
            return {"inner": left["inner"][:, :2]}
        return left["inner"] if self.function == "finish" else left


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("start", r"start of Opposite returned a dict; it must return Start\(…\)"),
        ("judge", r"judge of Opposite returned a tensor of shape \(4, 3\); it must return Judged\(…\)"),
        ("shorter judge", r"is judged by 'inner' as a tensor of shape \(4, 2\); .* \(4, 3\)"),
        ("finish", r"finish of Opposite returned a tensor of shape \(4, 3\); it must return a dict"),
        ("shorter finish", r"leaves 'inner' as a tensor of shape \(4, 2\); .* \(4, 3\)"),
    ],
)
def test_a_part_that_returns_something_else_is_stopped(function: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=said):
        run(_peers(Opposite(3, 0.1, function=function), "lockstep"), out=tmp_path / "run")


@dataclass(frozen=True)
class Unfinished(Part, AmongPeers):
    steps: int = 2
    name = kind = "unfinished"

    def parts(self) -> tuple[Part, ...]:
        return (self,)


def test_a_function_that_was_forgotten_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="Unfinished has no function carries"):
        run(_peers(Unfinished(), "lockstep"), out=tmp_path / "run")


@dataclass(frozen=True)
class Hoarding(SGP):
    """Keeps what it was handed beside what it returns."""

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        lam = HOARD.setdefault("lam", memory["lam"])
        made = super().step(at, inbox, memory)
        return replace(made, report={"loss": made.report["loss"] + lam.sum()})


HOARD: dict[str, Tensor] = {}


def test_what_is_kept_without_being_returned_shows_in_strict_runs(tmp_path: Path) -> None:
    for strict in (False, True):
        HOARD.clear()
        scenario = Example(Hoarding(3, 0.1), two_levels).scenario("lockstep")
        if not strict:
            run(scenario, out=tmp_path / "run")
            continue
        with pytest.raises(DivergenceError, match="loss of client 0 became nan at step 1"):
            run(scenario, out=tmp_path / "strict", strict=True)


@dataclass(frozen=True)
class Borrowing(Part):
    """Begins with the very tensors it is handed, and steps on both."""

    name = kind = "borrowing"
    steps = 2

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"y": sizes.inner}

    def start(self, at: At, carried: Tensors) -> Start:
        return Start({"y": carried["inner"]}, {"first": at.starting_inner, "mine": carried["mine"]})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        mine, first = memory["mine"] + 1, memory["first"] * 3
        return Step({"y": inbox["y"].mul_(2.0)}, memory={"mine": mine, "first": first})

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["y"], inbox["y"][:, :0])


@dataclass(frozen=True)
class Lending(AmongPeers):
    def parts(self) -> tuple[Part, ...]:
        return (Borrowing(), Borrowing())

    @property
    def passes_on(self) -> tuple[str, ...]:
        return ("mine",)


@every_kind
def test_what_earlier_parts_left_is_not_changed_by_later_ones(kind: Kind, tmp_path: Path) -> None:
    given = {"inner": torch.randn(4, 3, dtype=torch.float64), "mine": torch.ones(4, 1, dtype=torch.float64)}
    final = run(_peers(Lending(), kind), out=tmp_path / "run", initial=given).final
    assert torch.equal(final["inner"], given["inner"])
    assert torch.equal(final["mine"], given["mine"])


@dataclass(frozen=True)
class Watched(SGP):
    """Stops when it has seen so many numbers."""

    enough: int = 8

    def watch(self, reports: Reports, clients: int) -> None:
        seen = sum(len(report.get("loss", ())) for report in reports)
        if seen >= self.enough:
            raise RunError(f"{seen} losses of {clients} clients")


@every_kind
def test_a_part_that_is_judged_is_watched_too(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="losses of 4 clients"):
        run(_peers(Watched(5, 0.1), kind), out=tmp_path / "run")


def _peers(protocol: Any, kind: Kind) -> Scenario:
    return Example(protocol).scenario(kind)


# --- with a server -------------------------------------------------------------------------------------

RoundFault = Callable[[Tensors, Tensors, Answer], Answer]


@dataclass(frozen=True)
class CountingRound(PlainInnerSteps):
    """Local steps whose clients count how often they made them."""

    fault: RoundFault = lambda board, memory, made: made
    folding: Callable[[Tensors, Tensors], Tensors] = lambda board, mean: dict(mean)

    levels: ClassVar[Mapping[str, Level | int]] = {**LEVELS, "count": 1}
    remembers = ("count",)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        made = super().local(at, board, memory)
        return self.fault(board, memory, replace(made, memory={"count": memory["count"] + 1}))

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return self.folding(board, mean)


@dataclass(frozen=True)
class CountingFedAvg(FedAvg):
    fault: RoundFault = lambda board, memory, made: made
    folding: Callable[[Tensors, Tensors], Tensors] = lambda board, mean: dict(mean)

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (CountingRound(self.local, iteration, fault=self.fault, folding=self.folding),)


def _reads_the_board(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    return replace(made, values={"y": made.values["y"] - board["q"]})


def _reads_what_it_does_not_remember(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    return replace(made, values={"y": made.values["y"] - memory["q"]})


def _answers_more(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    return replace(made, values={**made.values, "q": made.values["y"]})


def _answers_for_all(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    return replace(made, values={"y": board["y"]})


def _answers_nothing(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    return replace(made, values={})


def _remembers_in_place(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    memory["count"].add_(1)
    return replace(made, memory={})


def _remembers_more(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    return replace(made, memory={"last": made.values["y"]})


def _overwrites_the_board(board: Tensors, memory: Tensors, made: Answer) -> Answer:
    board["y"].add_(1)
    return made


AT_CLIENTS: dict[RoundFault, str] = {
    _reads_the_board: "CountingRound reads 'q', which it does not declare; it declares x, y",
    _reads_what_it_does_not_remember: "CountingRound reads 'q', which it does not declare; it declares count",
    _answers_more: r"CountingRound sends y \(3\), q \(3\), but declares y \(3\)",
    _answers_for_all: r"CountingRound sends 'y' as a tensor of shape \(3,\); it must be a tensor",
    _answers_nothing: r"CountingRound sends nothing, but declares y \(3\)",
    _remembers_in_place: "a step of CountingRound changed 'count' of its memory in place",
    _remembers_more: "CountingRound remembers last, but",
    _overwrites_the_board: "a step of CountingRound changed 'y', which it was sent, in place",
}


def _answers_with_a_dict(board: Tensors, memory: Tensors, made: Answer) -> Any:
    return made.values


AT_CLIENTS[_answers_with_a_dict] = r"local of CountingRound returned dict; it must return Answer\(…\)"


def _writes_more(board: Tensors, mean: Tensors) -> Tensors:
    return {**mean, "q": mean["y"]}


def _writes_nothing(board: Tensors, mean: Tensors) -> Tensors:
    return {}


def _changes_the_board(board: Tensors, mean: Tensors) -> Tensors:
    board["y"].copy_(mean["y"])
    return dict(mean)


def _reads_no_answer(board: Tensors, mean: Tensors) -> Tensors:
    return {"y": mean["y"] - mean["q"]}


def _writes_a_tensor(board: Tensors, mean: Tensors) -> Any:
    return mean["y"]


AT_SERVER: dict[Callable[[Tensors, Tensors], Tensors], str] = {
    _writes_a_tensor: "fold of CountingRound returned Tensor; it must return a dict",
    _writes_more: "CountingRound declares that it writes y, and wrote y, q",
    _writes_nothing: "CountingRound declares that it writes y, and wrote nothing",
    _changes_the_board: "a step of CountingRound changed 'inner' of its memory in place",
    _reads_no_answer: "CountingRound reads 'q', which it does not declare; it declares y",
}


@every_kind
@pytest.mark.parametrize("strict", [False, True])
def test_a_round_that_keeps_the_rules_runs(kind: Kind, strict: bool, tmp_path: Path) -> None:
    result = run(_rounds(kind), out=tmp_path / "run", strict=strict)
    steps = result.trace.steps()
    worked = steps[steps["client"] < 4].groupby("client").size()
    assert result.final["clients/count"].flatten().tolist() == worked.reindex(range(4), fill_value=0).tolist()


@every_kind
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fault", AT_CLIENTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_round_that_breaks_a_rule_is_stopped(
    fault: RoundFault, kind: Kind, strict: bool, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=AT_CLIENTS[fault]):
        run(_rounds(kind, fault=fault), out=tmp_path / "run", strict=strict)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("folding", AT_SERVER, ids=lambda folding: folding.__name__.strip("_"))
def test_a_server_that_breaks_a_rule_is_stopped(
    folding: Callable[[Tensors, Tensors], Tensors], strict: bool, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=AT_SERVER[folding]):
        run(_rounds("lockstep", folding=folding), out=tmp_path / "run", strict=strict)


@dataclass(frozen=True)
class OfUnknownLength(CountingRound):
    levels = LEVELS


@dataclass(frozen=True)
class Single(FedAvg):
    single: bool = True

    def rounds(self, iteration: int, streams: Streams) -> Any:
        rounds = (OfUnknownLength(self.local, iteration),)
        return rounds[0] if self.single else rounds


def test_a_method_without_a_tuple_of_rounds_or_lengths_is_refused(tmp_path: Path) -> None:
    local = LocalSteps(0.1, steps=2)
    with pytest.raises(ScenarioError, match="returned a single OfUnknownLength; it must return a tuple"):
        run(Example(Single(3, local)).scenario("lockstep"), out=tmp_path / "one")
    with pytest.raises(ScenarioError, match="'count', and its `levels` do not say how long that is"):
        run(Example(Single(3, local, single=False)).scenario("lockstep"), out=tmp_path / "two")


def _rounds(kind: Kind, **wrong: Any) -> Scenario:
    return Example(CountingFedAvg(3, LocalSteps(0.1, steps=2), **wrong)).scenario(kind)
