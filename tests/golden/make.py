"""Write `golden.json` anew, from what the code does now: `python -m tests.golden.make`.

Do so only where behaviour is meant to change, and say in the commit which scenarios changed and why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from asyncfed import run
from tests.golden.digests import Digest, digest
from tests.golden.scenarios import scenarios

GOLDEN = Path(__file__).with_name("golden.json")


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Digest] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, scenario in scenarios().items():
            found[name] = digest(run(scenario, out=Path(directory) / name))
    GOLDEN.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    print(f"{len(found)} scenarios in {GOLDEN.name}")


if __name__ == "__main__":
    main()
