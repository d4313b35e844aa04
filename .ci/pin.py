r"""Merge pip's resolution reports into one constraints file, printed to stdout.

Usage, once for each Python (and for each torch build, CPU and CUDA) that is to be covered::

    pip install --dry-run --ignore-installed --report one.json \
        -e ".[gymnasium,megatron,mlflow,reasoning-gym,tensorboard,wandb]" --group dev --group test-browser
    python .ci/pin.py one.json two.json > constraints.txt

Resolve the later ones with ``-c`` and the result of the earlier ones, so that all share a version where they can;
where they cannot, the pin gets a marker of its Python. Local version labels (``+cpu``) are left out: which build of
torch is taken is for the package index to say.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

OWN = "penstock"
HEADER = """\
# The full set of dependencies at the versions that are tested, for Python 3.11 and 3.12, with torch for CPU or CUDA.
# Written by .ci/pin.py; CONTRIBUTING.md says how.
"""


def main(paths: list[str]) -> None:
    pins: defaultdict[str, dict[str, set[str]]] = defaultdict(dict)  # name -> version -> Pythons
    pythons: set[str] = set()
    for path in paths:
        report = json.loads(Path(path).read_text())
        python = report["environment"]["python_version"]
        pythons.add(python)
        for item in report["install"]:
            name = item["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
            version = item["metadata"]["version"].split("+")[0]
            if name != OWN:
                pins[name].setdefault(version, set()).add(python)
    print(HEADER + "\n".join(line for name in sorted(pins) for line in lines_of(name, pins[name])))


def lines_of(name: str, versions: dict[str, set[str]]) -> list[str]:
    if len(versions) == 1:
        return [f"{name}=={next(iter(versions))}"]
    claimed = [python for pythons in versions.values() for python in pythons]
    if len(claimed) != len(set(claimed)):
        sys.exit(f"{name}: two versions for one Python: {versions}")
    return [
        f'{name}=={version} ; python_version == "{python}"'
        for version, pythons in sorted(versions.items())
        for python in sorted(pythons)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
