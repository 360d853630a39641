"""Pages of the documentation site that are made of what stands elsewhere: the README, the notebooks, the
modules, and a list of the decision records. mkdocs calls these functions (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
REPOSITORY_ONLY = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)?((?:scenarios|asyncfed|topologies|benchmarks|tests|LICENSE|CITATION|CHANGELOG)[^)]*)\)"
)
MODULES = (
    "asyncfed",
    "asyncfed.problems",
    "asyncfed.protocols",
    "asyncfed.data",
    "asyncfed.network",
    "asyncfed.trace",
    "asyncfed.report",
    "asyncfed.trackers",
    "asyncfed.truth",
    "topologies",
)


@event_priority(100)  # before the notebooks are looked for
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not stand in docs/."""
    made = {"index.md": (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")}
    made |= {f"api/{module}.md": f"# {module}\n\n::: {module}\n" for module in MODULES}
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [record.read_text("utf-8").splitlines()[0].lstrip("# ") for record in records]
    lines = [f"- [{title}]({record.name})" for title, record in zip(titles, records, strict=True)]
    made["decisions/index.md"] = "\n".join(["# Decisions", "", *lines, ""])
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{notebook.name}"
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Folders are links in the repository, and pages or words on the site."""
    markdown = markdown.replace("](decisions/)", "](decisions/index.md)")
    markdown = markdown.replace("](../notebooks)", "](notebooks/1-first-run.ipynb)")
    return REPOSITORY_ONLY.sub(r"\1 (`\2` in the repository)", markdown)
