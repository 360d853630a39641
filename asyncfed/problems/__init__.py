"""Inner and outer losses of one client, their derivatives for many, and the problems that come along."""

from asyncfed.problems.bilevel_quadratic import (
    bilevel_quadratic,
    local_hypergradient_solution,
    shared_hypergradient,
    shared_solution,
)
from asyncfed.problems.characters import personalized_characters
from asyncfed.problems.classification import classification
from asyncfed.problems.compositional import compositional, compositional_solution
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.hyper_representation import hyper_representation
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.logistic_pair import logistic_pair
from asyncfed.problems.loss_tuning import loss_tuning
from asyncfed.problems.minimax_saddle import minimax_saddle, saddle_point
from asyncfed.problems.modules import from_module
from asyncfed.problems.normal_mixture import mixture_truth, normal_mixture
from asyncfed.problems.personalized import personalized, personalized_classification
from asyncfed.problems.problem import (
    Buffers,
    Mixture,
    Network,
    Problem,
    Recipe,
    Stages,
    problem_factory,
    problem_from_recipe,
    recipe_type,
)
from asyncfed.problems.quadratic import average_minimiser, quadratic
from asyncfed.problems.regularization_tuning import regularization_tuning

__all__ = [
    "Buffers",
    "Derivatives",
    "Layout",
    "Mixture",
    "Network",
    "Params",
    "Problem",
    "Recipe",
    "Stages",
    "average_minimiser",
    "bilevel_quadratic",
    "classification",
    "compositional",
    "compositional_solution",
    "from_module",
    "hyper_representation",
    "local_hypergradient_solution",
    "logistic_pair",
    "loss_tuning",
    "minimax_saddle",
    "mixture_truth",
    "normal_mixture",
    "personalized",
    "personalized_characters",
    "personalized_classification",
    "problem_factory",
    "problem_from_recipe",
    "quadratic",
    "recipe_type",
    "regularization_tuning",
    "saddle_point",
    "shared_hypergradient",
    "shared_solution",
]
