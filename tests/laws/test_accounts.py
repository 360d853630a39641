"""Every potential message is in the trace, once; what is counted elsewhere agrees; bytes are those of the
tensors that travelled.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate

import pandas as pd
import pytest

from asyncfed.network.buffer import Buffered
from asyncfed.trace.columns import STATUS_NAMES, Totals
from tests.laws.examples import Case, cases
from tests.laws.runs import Runs, Told, every_case

among_peers, with_server = (
    pytest.mark.parametrize(
        "case",
        [case for case in cases() if (case.example.protocol.server is None) == peers],
        ids=lambda case: case.name,
    )
    for peers in (True, False)
)


def _rows(table: pd.DataFrame, *columns: str) -> Iterator[tuple[int, ...]]:
    return zip(*(table[name].tolist() for name in columns), strict=True)


def _sent(messages: pd.DataFrame) -> pd.DataFrame:
    return messages[messages["status"] != "link_down"]


def _answers(told: Told, messages: pd.DataFrame) -> pd.DataFrame:
    return messages[messages["receiver"] == told.server]


def _requests(told: Told, messages: pd.DataFrame) -> pd.DataFrame:
    return messages[messages["sender"] == told.server]


# --- a row for each ------------------------------------------------------------------------------------


@among_peers
def test_every_step_sends_one_message_on_every_link(case: Case, told: Runs) -> None:
    """But not to those who have made all their steps of the part, or have gone for good, and left."""
    run = told(case)
    graph = run.scenario.topology.to_directed()
    messages, steps = run.result.trace.to_pandas(), run.result.trace.steps()
    made = {(client, step): at for client, step, at in _rows(steps, "client", "step", "ended_at")}
    assert len(made) == len(steps), f"{case.name}: a step is in the trace twice"
    expected, first = [], 0
    for part in run.parts():
        numbers = range(first, first + part.steps)
        left = steps[steps["step"].isin(numbers)].groupby("client")["ended_at"].max()
        first += part.steps + part.closing
        for step in numbers:
            for sender in graph:
                if (sender, step) not in made and left[sender] < left.max():
                    assert run.scenario.timing.presence is not None, f"{case.name}: {sender} stopped"
                    continue
                ended = made.pop((sender, step))
                if not part.sends:
                    continue
                for receiver in graph.successors(sender):
                    if left[receiver] >= ended:
                        expected.append((step, sender, receiver))
    assert not made, f"{case.name}: steps that no part makes: {sorted(made)}"
    found = Counter(_rows(messages, "step", "sender", "receiver"))
    wanted = Counter(expected)
    where = f"{case.name}: (step, sender, receiver)"
    assert found == wanted, f"{where} {list(found - wanted)} too many, {list(wanted - found)} missing"


@with_server
def test_every_request_and_every_answer_has_a_row(case: Case, told: Runs) -> None:
    run = told(case)
    server, clients = run.scenario.protocol.server, run.scenario.clients
    messages, steps = run.result.trace.to_pandas(), run.result.trace.steps()
    requests, answers = _requests(run, messages), _answers(run, messages)
    assert len(requests) + len(answers) == len(messages), f"{case.name}: a message that is neither"
    rounds = [part for part in run.parts() if part.asks]
    numbers = list(range(len(rounds)))
    always = run.scenario.timing.presence is None  # else fewer may be there, and works end with clients
    if isinstance(server, Buffered):  # who is at work on an older request is not asked in every round
        assert set(requests["step"]) <= set(numbers), f"{case.name}: requests of no round"
    else:
        assert sorted(set(requests["step"])) == numbers, f"{case.name}: rounds without requests"
        asked = requests.groupby("step")["receiver"].nunique()
        most = max(1, int(server.participation * clients + 0.5))
        enough = asked == most if always else asked <= most
        assert enough.all(), f"{case.name}: asks {asked.tolist()} clients instead of {most}"
    at_clients = steps[steps["client"] != run.server]
    worked = Counter(_rows(at_clients, "client", "step"))
    answered = Counter(_rows(answers, "sender", "step"))
    assert worked == answered, f"{case.name}: works {worked} and answers {answered}"
    reached = Counter(_rows(requests[requests["status"] == "delivered"], "receiver", "step"))
    assert worked <= reached, f"{case.name}: work without a request"
    if case.kind == "lockstep" and always:
        assert worked == reached, f"{case.name}: a request that arrived without any work on it"
    computed = Counter(
        key for seen in run.seen for key in zip(seen.clients, seen.steps, strict=True) if key[0] != run.server
    )
    assert computed <= worked, f"{case.name}: a step that is not in the trace"
    used = Counter(_rows(answers[answers["status"] == "delivered"], "sender", "step"))
    assert used <= computed, f"{case.name}: an answer that nobody made"
    of_server = steps[steps["client"] == run.server]
    assert of_server["step"].tolist() == numbers, f"{case.name}: the server's own steps"


@every_case
def test_what_is_delivered_is_absorbed_once(case: Case, told: Runs) -> None:
    """What the last steps of a part among peers sent is absorbed at its end, which is no step; of a server's
    clients every step absorbs one request.
    """
    run = told(case)
    messages, steps = run.result.trace.to_pandas(), run.result.trace.steps()
    lengths = [part.steps + part.closing for part in run.parts()] if run.server is None else []
    starts = list(accumulate(lengths, initial=0))
    delivered = messages[messages["status"] == "delivered"]
    assert delivered["absorbed_step"].notna().all(), case.name
    absorbed = Counter(
        (receiver, step)
        for receiver, sent, step in _rows(delivered, "receiver", "step", "absorbed_step")
        if bisect(starts, sent) == bisect(starts, step)
    )
    for client, step, count in _rows(steps, "client", "step", "absorbed"):
        expected = absorbed[client, step] if run.server in (None, client) else 1
        assert count == expected, f"{case.name}: step {step} of {client} absorbed {count}, not {expected}"
    carried = messages["status"] == "carried"
    assert messages[carried]["absorbed_step"].notna().all(), case.name
    others = messages[(messages["status"] != "delivered") & ~carried]
    assert others["absorbed_step"].isna().all(), f"{case.name}: absorbed what was not delivered"


# --- counted again -------------------------------------------------------------------------------------


@every_case
def test_totals_agree_wherever_they_stand(case: Case, told: Runs) -> None:
    run = told(case)
    messages = run.result.trace.to_pandas()
    counts = Counter(messages["status"].tolist())
    assert set(counts) <= set(STATUS_NAMES)
    recounted = Totals(
        sent=len(_sent(messages)),
        bytes=int(_sent(messages)["bytes"].sum()),
        **{name: counts[name] for name in STATUS_NAMES},
    )
    assert sum(recounted[1:-1]) == len(messages), f"{case.name}: statuses do not add up"
    assert run.result.trace.totals() == recounted, case.name
    assert Totals(**run.result.manifest["totals"]) == recounted, f"{case.name}: run.json counts differently"


@every_case
def test_metrics_count_what_the_trace_holds(case: Case, told: Runs) -> None:
    """Among peers at every evaluation; with a server at the last, for before it answers that are still being
    made count as sent. That a message is lost for good is known later where the next one may carry it, or
    where a client crashes that it had reached.
    """
    run = told(case)
    messages, metrics = _sent(run.result.trace.to_pandas()), run.result.metrics
    given = run.scenario.timing.running_sums
    conserves = run.server is None and any(part.conserves for part in run.parts())
    summed = conserves if given is None else given
    for place, row in enumerate(metrics.to_dict("records")):
        last = place == len(metrics) - 1
        if run.server is not None and not last:
            continue
        so_far = messages if run.server is not None else messages[messages["sent_at"] <= row["virtual_time"]]
        where = f"{case.name}, evaluation {place} of {len(metrics)}"
        assert row["messages"] == len(so_far), f"{where}: messages"
        assert row["bytes"] == so_far["bytes"].sum(), f"{where}: bytes"
        lost = (so_far["status"] == "lost").sum()
        lags = not last and (summed or run.scenario.timing.presence is not None)
        assert row["lost"] == lost or (lags and row["lost"] < lost), f"{where}: lost"
        arrived = so_far[(so_far["status"] == "delivered") & (so_far["arrived_at"] <= row["virtual_time"])]
        found_out_later = lost - row["lost"] if run.scenario.timing.presence is not None else 0
        assert 0 <= row["delivered"] - len(arrived) <= found_out_later, f"{where}: delivered"
    for name in ("messages", "bytes", "delivered", "lost"):
        assert metrics[name].is_monotonic_increasing, f"{case.name}: {name} shrinks"


# --- bytes ---------------------------------------------------------------------------------------------


@every_case
def test_a_message_is_as_large_as_the_tensors_it_carries(case: Case, told: Runs) -> None:
    """Of a server's requests see below."""
    run = told(case)
    made = {
        (client, step): sum(seen.made.values())
        for seen in run.seen
        for client, step in zip(seen.clients, seen.steps, strict=True)
    }
    messages = _sent(run.result.trace.to_pandas())
    checked = 0
    for sender, step, status, size in _rows(messages, "sender", "step", "status", "bytes"):
        if sender == run.server:
            continue
        if run.server is not None and (sender, step) not in made:  # an answer that nobody waited for
            assert status != "delivered", f"{case.name}: an answer that nobody made"
            continue
        checked += 1
        assert size == made[sender, step], f"{case.name}: step {step} of {sender} made {made[sender, step]}"
    assert checked or not len(messages), case.name


@with_server
def test_a_request_carries_what_its_client_does_not_have(case: Case, told: Runs) -> None:
    """A variable is sent to a client for as long as the server has used no answer of it to that version; and
    it must be sent where no answer to that version has come. In lockstep that is the same. A buffered server
    knows of an answer as soon as it has come.
    """
    run = told(case)
    messages = run.result.trace.to_pandas()
    version: Counter[str] = Counter()
    read: dict[int, dict[str, tuple[int, int]]] = {}  # round → variable → its version and size
    for seen in run.seen:
        if seen.clients == [run.server]:
            version.update(seen.made.keys())
            continue
        for step in set(seen.steps) - read.keys():
            read[step] = {name: (version[name], size) for name, size in seen.read.items()}
    answers = _answers(run, messages)
    came, used = defaultdict(list), defaultdict(list)
    for client, step, status, at, absorbed in _rows(
        answers, "sender", "step", "status", "arrived_at", "absorbed_step"
    ):
        if status in ("delivered", "late"):
            came[client].append((at, step))
        if status == "delivered":
            used[client].append((absorbed, step))
    requests = _requests(run, messages)
    assert len(requests)
    for client, step, status, at, size in _rows(requests, "receiver", "step", "status", "sent_at", "bytes"):
        if status == "link_down":
            assert size == 0, f"{case.name}: bytes on a link that is down"
            continue
        had = [(name, read[old][name][0]) for when, old in came[client] if when <= at for name in read[old]]
        known = [(name, read[old][name][0]) for by, old in used[client] if by < step for name in read[old]]
        least, most = (
            sum(bytes for name, (number, bytes) in read[step].items() if (name, number) not in has)
            for has in (had, known)
        )
        where = f"{case.name}: a request of round {step} to {client} has {size} bytes"
        assert least <= size <= most, f"{where}, not {least} to {most}"
        if isinstance(run.scenario.protocol.server, Buffered):
            assert size == least, where
        elif case.kind == "lockstep":
            assert least == most, where
