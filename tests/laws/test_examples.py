"""Every registered method is tried: each has examples, and says why it does not run where it does not."""

from __future__ import annotations

import pytest

from tests.laws.examples import GIVEN, Example, examples, examples_of, methods, refusal


@pytest.mark.parametrize("method", methods())
def test_every_method_has_an_example(method: str) -> None:
    try:
        found = examples_of(method)
    except LookupError as error:
        pytest.fail(str(error))
    names = [type(example.protocol).__name__ for example in found]
    assert names == [method] * len(found), f"the examples of {method} are of {', '.join(names)}"


def test_examples_are_of_methods_that_exist() -> None:
    assert set(GIVEN) <= set(methods())


def test_examples_have_names_of_their_own() -> None:
    names = [example.name for example in examples()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_what_runs_in_one_timing_only_says_so(example: Example) -> None:
    lockstep, virtual = refusal(example, "lockstep"), refusal(example, "virtual")
    assert lockstep is None or virtual is None, f"{example.name} runs nowhere: {lockstep}; {virtual}"
    if lockstep is not None:
        assert "virtual time" in lockstep, f"{example.name} does not say that it needs virtual time"
    if virtual is not None:
        said = "Lockstep()" in virtual or "everybody in step" in virtual
        assert said, f"{example.name} does not say that it needs lockstep: {virtual}"
