"""What studies of 001's personalization tables say: accuracies beside the paper's, whether its order holds,
and the evidence for rows that gain nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from asyncfed import Result, Summary, SummaryTable
from scenarios._personalization import BEGINNINGS, FASTER_ROW, PDBOS

Paper = Mapping[str, Mapping[str, tuple[float, float]]]

# The order of Table 1 and Table 4 on stochastic directed links, best first.
_RANKING = ("PDBO-MTL&DA", "PDBO-MTL", "PDBO-DA", "SGP", "Local")


_FIGURES = ("accuracy", "accuracy_p10")


def reported(method: str, result: Result) -> dict[str, Any] | None:
    """The figures of a run that count: at the outer step of the best validation accuracy, or at the end; None
    of one that diverged before there were any.
    """
    if method in PDBOS:
        return result.best if len(result.metrics) else None
    return dict(result.metrics.iloc[-1]) if result.complete else None


def summarise(results: Mapping[str, Result], paper: Paper, title: str, notes: Sequence[str] = ()) -> Summary:
    """Accuracy and 10th percentile, ours and the paper's; whether its order holds; evidence; curves."""
    import pandas as pd

    lines: list[dict[str, Any]] = []
    found: dict[str, dict[str, tuple[float, float] | None]] = {}
    for where, method, figures, result in _rows(results):
        ours = None if figures is None else tuple(100 * float(figures[name]) for name in _FIGURES)
        whole = result.complete or (method in BEGINNINGS and ours is not None)
        found.setdefault(where, {})[method] = (ours[0], ours[1]) if whole and ours is not None else None
        theirs = paper.get(where, {}).get(method)
        step = "–" if figures is None or method not in PDBOS else str(int(figures["outer_step"]))
        lines.append(
            {
                "network": where,
                "method": method,
                "accuracy": "diverged" if ours is None else f"{ours[0]:.1f} / {ours[1]:.1f}",
                **({"paper": f"{theirs[0]:.1f} / {theirs[1]:.1f}" if theirs else "–"} if paper else {}),
                "outer step": step if whole or ours is None else f"{step}, then it diverged",
                "MB sent": "–" if figures is None else f"{float(figures['bytes']) / 1e6:,.0f}",
                "seconds": "–" if method in BEGINNINGS else round(float(result.manifest["wall_seconds"])),
            }
        )
    table = SummaryTable(
        title,
        pd.DataFrame(lines),
        (
            "accuracy in %, mean over test samples / client at the 10th percentile; for PDBO at the outer "
            "step of the best validation accuracy, up to which its MB are counted",
            *notes,
        ),
    )
    findings = [finding for where in found for finding in _order(where, found[where])]
    curves = _accuracies(results, short=len(found) == 1)

    def draw(path: Any) -> object:
        from asyncfed.report import draw_curves

        return draw_curves(path, curves, xlabel="outer step", ylabel="test accuracy, %", title=title)

    return Summary([table, *_evidence(results)], findings, {"outer-steps": draw} if curves else {})


def _rows(results: Mapping[str, Result]) -> Iterator[tuple[str, str, dict[str, Any] | None, Result]]:
    """Network, method, its figures and the run they are from; of a method that another begins with, those of
    outer step 0, unless it has a run of its own. SGP on FC is FedAvg: what FedAvg+ has before its tuning,
    where there is nothing else.
    """
    for name, result in results.items():
        where, method = name.split("/")
        if method == "FedAvg+" and not {f"{where}/SGP", f"{where}/{BEGINNINGS['SGP']}"} & results.keys():
            yield where, "SGP", _before_tuning(result), result
        for beginning, of in BEGINNINGS.items():
            if of == method and f"{where}/{beginning}" not in results:
                metrics = result.metrics
                begun = metrics[metrics["outer_step"] == 0] if len(metrics) else metrics
                yield where, beginning, dict(begun.iloc[-1]) if len(begun) else None, result
        yield where, method, reported(method, result), result


def _before_tuning(result: Result) -> dict[str, Any] | None:
    """What FedAvg+ is before everybody tunes its model."""
    if not result.complete:
        return None
    own, end = result.clients["accuracy_tuned_0"], result.metrics.iloc[-1]
    figures = (float(end["accuracy_tuned_0"]), float(own.quantile(0.1)))
    return dict(end) | dict(zip(_FIGURES, figures, strict=True))


def _accuracies(results: Mapping[str, Result], short: bool) -> dict[str, tuple[Any, Any]]:
    """Accuracy over outer steps, by method; of one without them, what it came to, all along. Nothing where no
    method has any.
    """
    tuned = {name for name, run in results.items() if name.split("/")[1] in PDBOS and len(run.metrics)}
    if not tuned:
        return {}
    end = max(results[name].metrics["outer_step"].iloc[-1] for name in tuned)
    curves: dict[str, tuple[Any, Any]] = {}
    for name, result in results.items():
        metrics, method = result.metrics, name.split("/")[1]
        figures = reported(method, result)
        if figures is None:
            continue
        level = [100 * float(figures["accuracy"])] * 2
        curves[method if short else name] = (
            (metrics["outer_step"], 100 * metrics["accuracy"]) if name in tuned else ((0, end), level)
        )
    return curves


def _order(where: str, found: Mapping[str, tuple[float, float] | None]) -> list[tuple[str, bool | None]]:
    """The paper's finding, pair by pair, in the mean and in the 10th percentile; and whether label weights do
    more than a higher rate does. None has diverged.
    """
    ranked = [method for method in _RANKING if method in found]
    pairs = list(pairwise(ranked))
    if FASTER_ROW in found and "PDBO-DA" in found:
        pairs.append(("PDBO-DA", FASTER_ROW))
    findings: list[tuple[str, bool | None]] = []
    for better, worse in pairs:
        ours, theirs = found[better], found[worse]
        if ours is None or theirs is None:
            diverged = " and ".join(name for name in (better, worse) if found[name] is None)
            findings.append((f"{where}: {better} ≥ {worse}: {diverged} diverged", None))
            continue
        for what, a, b in zip(("mean", "10th percentile"), ours, theirs, strict=True):
            findings.append((f"{where}: {better} ({a:.1f}) ≥ {worse} ({b:.1f}), {what}", a >= b))
    return findings


def _evidence(results: Mapping[str, Result]) -> list[SummaryTable]:
    """What the outer steps did: validation accuracy, how far λ went, and how much of the last hypergradient
    is direct.
    """
    import pandas as pd

    lines = []
    for name, result in results.items():
        where, method = name.split("/")
        if method not in PDBOS or not len(result.metrics):
            continue
        solved = result.metrics.groupby("outer_step")["validation_accuracy"].last()
        lines.append(
            {
                "network": where,
                "method": method,
                "validation, % by outer step": " ".join(f"{100 * value:.1f}" for value in solved),
                **(_moved(result) if result.complete else dict.fromkeys(_MOVED, "–")),
            }
        )
    note = "direct share: of ‖∂_λ F‖ in ‖∂_λ F‖ + ‖indirect part‖ at the last outer step, mean over clients"
    return [SummaryTable("What the outer steps did", pd.DataFrame(lines), (note,))] if lines else []


_MOVED = ("mean ‖λ‖", "largest |λ|", "direct share")


def _moved(result: Result) -> dict[str, str]:
    """How far λ went, and how much of the last hypergradient is direct."""
    outer, whole, direct = (result.final[name] for name in ("outer", "hypergradient", "direct"))
    sizes = direct.norm(dim=1), (whole - direct).norm(dim=1)
    share = (sizes[0] / (sizes[0] + sizes[1]).clamp_min(1e-30)).mean()
    told = f"{outer.norm(dim=1).mean():.2f}", f"{outer.abs().max():.2f}", f"{100 * float(share):.0f}%"
    return dict(zip(_MOVED, told, strict=True))
