"""Inner and outer losses of one client, their derivatives for many, and the problems that come along."""

from asyncfed.problems.bilevel_quadratic import bilevel_quadratic
from asyncfed.problems.characters import personalized_characters
from asyncfed.problems.classification import classification
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.logistic_pair import logistic_pair
from asyncfed.problems.personalized import personalized, personalized_classification
from asyncfed.problems.problem import (
    Problem,
    Recipe,
    Stages,
    problem_factory,
    problem_from_recipe,
    recipe_type,
)
from asyncfed.problems.quadratic import average_minimiser, quadratic

__all__ = [
    "Derivatives",
    "Layout",
    "Params",
    "Problem",
    "Recipe",
    "Stages",
    "average_minimiser",
    "bilevel_quadratic",
    "classification",
    "logistic_pair",
    "personalized",
    "personalized_characters",
    "personalized_classification",
    "problem_factory",
    "problem_from_recipe",
    "quadratic",
    "recipe_type",
]
