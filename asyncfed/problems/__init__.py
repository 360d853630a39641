"""Inner and outer losses of one client, their derivatives for many, and the problems that come along."""

from asyncfed.problems.classification import classification
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.problem import Problem, Recipe, problem_factory, problem_from_recipe, recipe_type
from asyncfed.problems.quadratic import average_minimiser, quadratic

__all__ = [
    "Derivatives",
    "Layout",
    "Params",
    "Problem",
    "Recipe",
    "average_minimiser",
    "classification",
    "problem_factory",
    "problem_from_recipe",
    "quadratic",
    "recipe_type",
]
