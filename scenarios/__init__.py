"""Scenarios to run by name: `asyncfed list`, `asyncfed run quickstart`.

One file each: a docstring, whose first line is listed, and a function `scenario(**parameters)` that returns a
`Scenario`, or `study(**parameters)` that returns a `Study` of several runs and what they say together.
"""
