"""Draw the diagrams of the documents as pictures of the site, which then needs no other host: `python -m tools.docs_pictures`.

A page has its diagram as text, which repositories draw themselves. The picture of the site is named by a digest of that text.
Needs npx, which downloads mermaid-cli, and Chromium as `chromium`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"
PICTURES: Final = DOCS / "pictures"
DIAGRAM: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BROWSER: Final = {"executablePath": shutil.which("chromium"), "args": ["--no-sandbox"]}
_STYLE: Final = {
    "theme": "neutral",
    "fontFamily": "sans-serif",
    "flowchart": {"htmlLabels": False},
    "deterministicIds": True,
    "deterministicIDSeed": "kvevents",
}


def picture_of(diagram: str) -> Path:
    """Return the picture of a diagram."""
    return PICTURES / f"{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"


def diagrams() -> dict[Path, str]:
    """Return the diagrams of all pages, by their pictures."""
    texts = (path.read_text(encoding="utf-8") for path in (DOCS.parent / "README.md", *DOCS.rglob("*.md")))
    return {picture_of(diagram): diagram for text in texts for diagram in DIAGRAM.findall(text)}


def main() -> None:
    """Draw the diagrams that have no picture, and remove the pictures that have no diagram."""
    diagrams_by_path = diagrams()
    for path in set(PICTURES.glob("*.svg")) - diagrams_by_path.keys():
        path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in (("browser", _BROWSER), ("style", _STYLE)):
            (Path(folder) / f"{name}.json").write_text(json.dumps(settings))
        for path, diagram in diagrams_by_path.items():
            if not path.exists():
                (Path(folder) / "diagram.mmd").write_text(diagram)
                command = ["npx", "--yes", "@mermaid-js/mermaid-cli@11", "-p", "browser.json", "-c", "style.json"]
                command += ["-b", "transparent", "-i", "diagram.mmd", "-o", str(path)]
                subprocess.run(command, check=True, cwd=folder, env=os.environ | {"PUPPETEER_SKIP_DOWNLOAD": "1"})  # noqa: S603


if __name__ == "__main__":
    main()
