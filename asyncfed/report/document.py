"""One HTML file for a colleague: what was run, how to run it again, tables, curves, network, matrix, time.

It opens from disk, without a network: scripts, styles, pictures and data stand in it, and its
Content-Security-Policy allows nothing else (scripts and styles by their hashes). The drawing code is the
explorer's, whose modules are put together here into one script; the data are answers of the explorer's index,
zipped. What names or texts of a run say is text, never markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from asyncfed.description import describe
from asyncfed.errors import ScenarioError, TraceError
from asyncfed.explorer import windows
from asyncfed.explorer.packed import packed
from asyncfed.explorer.runs import ExploredRun, opened
from asyncfed.explorer.server import static_files
from asyncfed.markup import text_table
from asyncfed.reading import read_whole
from asyncfed.runtime.directory import plain_json
from asyncfed.study import StudyResult, load_study
from asyncfed.study.summary import answer, table_markup, text_columns

MOST_BYTES = 5_000_000
MOST_DRAWN = 4  # runs whose networks are drawn; the others are in the curves and tables
MOST_PARTS = 24  # of a study
_MOST_PICTURES = 2_000_000  # bytes, of a study
_MOST_SCENARIO = 200_000
_MODULES = (
    "words.js", "colours.js", "canvas.js", "panel.js", "store.js", "source.js", "quantities.js",
    "learning.js", "clients.js", "network.js", "lanes.js", "spacetime.js", "matrix.js", "details.js",
    "views.js", "report.js",
)  # fmt: skip


def report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> Path:
    """Write a report of run directories, or of a study, to the HTML file `out`; returns its path."""
    paths = [Path(runs)] if isinstance(runs, (str, os.PathLike)) else [Path(path) for path in runs]
    if not paths:
        raise ScenarioError("a report is of at least one run; give the directory of one")
    studies = [load_study(path) for path in paths if (path / "study.json").exists()]
    explored = opened(list(_directories(paths)))
    for run in explored:
        run.follow()
        if run.error:
            raise TraceError(run.error)
    static = _studies(studies) + _runs(explored)
    target = Path(out)
    for edges in (100_000, 30_000, 10_000, 3_000, 1_000, 300):
        page = _page(explored, static, edges)
        if len(page) <= MOST_BYTES:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(page)
            return target
    raise ScenarioError(
        f"a report of {len(explored)} runs would have {len(page):,} bytes, more than {MOST_BYTES:,}; "
        "give fewer runs, or look at them with `asyncfed view`"
    )


def _directories(paths: Sequence[Path]) -> Iterator[Path]:
    """The runs, and of a study the first parts that are complete."""
    for path in paths:
        if (path / "study.json").exists():
            yield from [path / part for part in list(load_study(path).results)[:MOST_PARTS]]
        else:
            yield path


def _page(explored: Sequence[ExploredRun], static: str, edges: int) -> bytes:
    files = static_files()
    style = files["style.css"].decode()
    script = bundled(files)
    data = {"runs": [_embedded(run, place < MOST_DRAWN, edges) for place, run in enumerate(explored)]}
    text = json.dumps(plain_json(data), ensure_ascii=True, allow_nan=False, default=float)
    text = text.replace("<", "\\u003c")  # nothing in it ends the element that it stands in
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = escape(", ".join(run.name for run in explored)[:200]) or "asyncfed"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}: asyncfed report</title>\n<style>{style}</style></head>\n"
        f'<body class="report"><header><h1>{title}</h1><p>A report of asyncfed. It needs no network.</p>'
        f"</header>\n<main>{static}</main>\n"
        f'<aside id="details" aria-label="Details"></aside>\n'
        f'<script type="application/json" id="data">{text}</script>\n'
        f'<script type="module">{script}</script></body></html>\n'
    ).encode()


def bundled(files: Mapping[str, bytes]) -> str:
    """The explorer's modules as one: every import is of something that stands above."""
    modules = (files[name].decode() for name in _MODULES)
    text = "\n".join(re.sub(r"^import .*?;$", "", module, flags=re.MULTILINE) for module in modules)
    return re.sub(r"^export (?=const|function|class|async)", "", text, flags=re.MULTILINE)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- what is drawn ---------------------------------------------------------------------------------------


def _embedded(run: ExploredRun, drawn: bool, edges: int) -> dict[str, Any]:
    """What the page asks for, of one run."""
    answers: dict[str, Any] = {"about": run.about(), "metrics": run.metrics(), "marks": run.marks()}
    binary = {"classes": run.classes()}
    detail = None
    if drawn:
        binary |= {
            "edges": run.edges(most=edges),
            "nodes": run.nodes(),
            "graph": run.graph(most=edges),
            "layout": run.spring(),
        }
        first, last = run.index.span()
        whole = windows.window(run.index, (first, math.inf), 0, run.index.nodes, 256, 128)
        binary["window"] = packed(whole[0], **whole[1])
        if whole[1]["kind"] == "cells":
            detail, binary["detail"] = _closer(run, first, last)
    zipped = {
        name: base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
        for name, content in binary.items()
    }
    return {"state": run.state(), "answers": answers | zipped, "detail": detail}


def _closer(run: ExploredRun, first: float, last: float) -> tuple[list[float], bytes]:
    """The longest window around the middle, of halves of halves, whose messages can all be drawn."""
    middle, width = (first + last) / 2, last - first
    for _ in range(60):
        width /= 2
        window = (middle - width / 2, middle + width / 2)
        columns, facts = windows.window(run.index, window, 0, run.index.nodes, 1)
        if facts["kind"] == "messages":
            break
    return list(window), packed(columns, **facts)


# --- what is written -------------------------------------------------------------------------------------


def _runs(explored: Sequence[ExploredRun]) -> str:
    told = "".join(_told(run) for run in explored[:MOST_DRAWN])
    more = len(explored) - MOST_DRAWN
    note = f"<p>{more} more runs are in the curves and tables.</p>" if more > 0 else ""
    sections = "".join(
        f'<section id="{name}" aria-label="{words}"><h2>{words}</h2></section>'
        for name, words in (
            ("learning", "Learning"),
            ("network", "Network"),
            ("matrix", "Matrix"),
            ("spacetime", "Space-time"),
            ("clients", "Clients"),
        )
    )
    return told + note + sections


def _told(run: ExploredRun) -> str:
    """What was run, how to run it again, and its last evaluations for whoever runs no scripts."""
    pairs = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in describe(run.result).items()
    )
    again = f"asyncfed.run(asyncfed.load({str(run.path)!r}).scenario)"
    data = run.result.scenario_data
    if "own" in data.get("problem", {}):
        how = "<p>Its problem was made of functions of one's own: run it from the Python file with these.</p>"
    else:
        command = f"python -c {shlex.quote(f'import asyncfed; {again}')}"
        how = f"<p>Run it again:</p><pre>{escape(command)}</pre>"
    scenario = json.dumps({key: value for key, value in data.items() if key != "versions"})
    if len(scenario) <= _MOST_SCENARIO and "own" not in data.get("problem", {}):
        how += (
            "<details><summary>Or without the run's directory, from its scenario</summary><p>Save this as "
            "<code>scenario.json</code>, and then: <code>from asyncfed.scenario_data import "
            "scenario_from_data; asyncfed.run(scenario_from_data(json.load(open('scenario.json'))))</code>"
            f"</p><pre>{escape(scenario)}</pre></details>"
        )
    return f"<section><h2>{escape(run.name)}</h2><dl>{pairs}</dl>{how}{_last(run)}</section>"


def _last(run: ExploredRun) -> str:
    metrics = run.result.metrics
    return (
        ""
        if metrics.empty
        else text_table(text_columns(metrics.tail(1).dropna(axis=1)), "The last evaluation")
    )


def _studies(studies: Sequence[StudyResult]) -> str:
    return "".join(_study(study) for study in studies)


def _study(study: StudyResult) -> str:
    """Tables, findings, pictures, and how its parts stand."""
    summary, note = study.summary, str(study.manifest.get("note") or "")
    parts = [f"<h2>The study {escape(study.name)}</h2>", f"<p>{escape(note)}</p>" if note else ""]
    parts += map(table_markup, summary.tables)
    if summary.findings:
        findings = "".join(
            f'<li data-holds="{answer(holds).strip()}">{escape(text)}</li>'
            for text, holds in summary.findings
        )
        parts.append(f'<h3>Findings</h3><ul class="findings">{findings}</ul>')
    left = _MOST_PICTURES
    for picture in study.pictures:
        try:
            content = read_whole(picture, left)
        except OSError:
            parts.append(f"<p>The picture {escape(picture.name)} is missing or too large.</p>")
            continue
        left -= len(content)
        source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        parts.append(f'<figure><img src="{source}" alt="{escape(picture.stem)}"></figure>')
    standing = {part: state["status"] for part, state in study.parts.items() if state["status"] != "complete"}
    if standing:
        listed = "; ".join(f"{part}: {status}" for part, status in standing.items())
        parts.append(f"<p>Not complete: {escape(listed[:2000])}</p>")
    if len(study.results) > MOST_PARTS:
        parts.append(f"<p>The first {MOST_PARTS} of its {len(study.results)} complete parts are drawn.</p>")
    return f"<section>{''.join(parts)}</section>"
