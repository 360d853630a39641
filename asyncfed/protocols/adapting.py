"""How a client that was not there when a method ran makes do with what the run left.

Most methods leave a model, which is taken as it is. A method that personalizes says in its `adaptation` what
a new client does with its own training samples, and with nobody else: an `Act` whose `judge` finds in its
inbox

    y       the model: the server's, or the mean of all peers'
    x       the outer variable, likewise
    lam     the outer variable that the new client's problem begins with
"""

from __future__ import annotations

from typing import Any

from asyncfed.errors import ScenarioError
from asyncfed.problems.problem import Problem
from asyncfed.protocols.part import Act, Method, Sizes
from asyncfed.protocols.rounds import JudgedByServer
from asyncfed.rng import Streams


def check_in_common(method: Method, models: int) -> None:
    """Refuse what a run of this method left, where it is no one model that others could take."""
    name = type(method).__name__
    if method.server is not None:
        if models > 1:
            raise ScenarioError(
                f"{name} left {models} models, and which of them a new client is to take is not known; "
                "judge it by each of them"
            )
        return
    parts = next(method.iterations(Streams(0)), ())
    training = [part for part in parts if part.judged and part.steps] or parts
    if not any(part.sends for part in training):
        raise ScenarioError(f"clients of {name} are alone: there is no model that others could take")


def require_no_steps(method: object, steps: int | None, do: str) -> None:
    """Refuse steps where it is not to be chosen how many new clients make; they `do` something else."""
    if steps is not None:
        name = type(method).__name__
        raise ScenarioError(f"steps is {steps}, and new clients of {name} {do}; leave it out")


def adaptation_of(method: Any, problem: Problem, sizes: Sizes, steps: int | None) -> Act:
    """What new clients with the data of `problem` do, in so many steps of their own where they make some."""
    name = type(method).__name__
    adaptation = getattr(method, "adaptation", None)
    if adaptation is not None:
        act: Act = adaptation(problem, steps)
        return act
    require_no_steps(method, steps, "make none")
    if method.server is None:
        return JudgedByServer()
    judging: Act = method.judging
    if judging.remembered(sizes):
        raise ScenarioError(
            f"clients of {name} are judged by what they remember, and it does not say what new ones do; "
            "write its `adaptation` (see docs/personalized-methods.md)"
        )
    return judging
