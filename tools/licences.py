"""Write the licence texts of all crates that are linked into the native wheel: `python tools/licences.py FILE`.

Equal texts are written once, below the names of all crates that have them. Build tools and procedural macros are left out: none
of their code is in the wheel. A crate without a text of its own has that of another crate of its repository.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

MANIFEST: Final = Path(__file__).resolve().parent.parent / "native" / "python" / "Cargo.toml"
LICENCE_FILE: Final = re.compile(r"(licen[sc]e|copying|notice|unlicense)", re.IGNORECASE)
RULE: Final = "-" * 100


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()  # noqa: S603 - cargo and rustc


def linked_crates() -> list[dict[str, Any]]:
    """Return Cargo's metadata of each crate of others in the library of this platform, by name and version."""
    options = (
        "--format-version",
        "1",
        "--locked",
        "--features",
        "python",
        "--filter-platform",
        output("rustc", "--print", "host-tuple"),
    )
    metadata = json.loads(output("cargo", "metadata", *options, "--manifest-path", str(MANIFEST)))
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    crates: set[str] = set()
    pending = [metadata["resolve"]["root"]]
    while pending:
        crate = pending.pop()
        is_macro = any("proc-macro" in target["kind"] for target in packages[crate]["targets"])
        if crate in crates or is_macro:
            continue
        crates.add(crate)
        pending += [link["pkg"] for link in nodes[crate]["deps"] if any(kind["kind"] is None for kind in link["dep_kinds"])]
    foreign_packages = [packages[crate] for crate in crates if packages[crate]["source"] is not None]
    return sorted(foreign_packages, key=lambda package: (package["name"], package["version"]))


def licence_files(crate: dict[str, Any]) -> list[Path]:
    """Return the licence texts in the folder of a crate."""
    folder = Path(crate["manifest_path"]).parent
    return sorted(path for path in folder.iterdir() if path.is_file() and LICENCE_FILE.match(path.name))


def main() -> None:
    """Write the file. Ends with an error if a crate has no licence text."""
    texts: dict[str, tuple[str, list[str]]] = {}
    crates = linked_crates()
    for crate in crates:
        title = f"{crate['name']} {crate['version']} ({crate['license']})"
        siblings = (candidate for candidate in crates if all(candidate[key] == crate[key] for key in ("repository", "license")))
        files = next(filter(None, map(licence_files, [crate, *siblings])), [])
        if not files:
            raise SystemExit(f"{title} has no licence text in {crate['manifest_path']}")
        for path in files:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            texts.setdefault(" ".join(text.split()), (text, []))[1].append(title)
    parts = ["The compiled module of kvevents-native contains code of these crates, under these licences."]
    parts += ["\n".join([RULE, *titles, RULE, "", text]) for text, titles in texts.values()]
    Path(sys.argv[1]).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
