"""Studies: several runs and what they say together, such as a table or a figure of a paper.

A study is a value, as a scenario is: named parts, and a function that makes a summary of their results.
`run_study` runs each part as an ordinary run inside the study's directory, and can be stopped and started
again at any time.
"""

from asyncfed.study.definition import Study
from asyncfed.study.directory import StudyResult, load_study
from asyncfed.study.running import StudyProgress, run_study
from asyncfed.study.summary import Summary, SummaryTable

__all__ = [
    "Study",
    "StudyProgress",
    "StudyResult",
    "Summary",
    "SummaryTable",
    "load_study",
    "run_study",
]
