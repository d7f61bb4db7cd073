"""Adds extras, addresses and the README to the metadata of `kvevents`.

Extras that use the compiled package, or the plane, require the same version of it. The addresses are those of the repository
that a release is built in, and of its documentation site. The release's workflow passes them in the environment variables
`KVEVENTS_REPOSITORY` and `KVEVENTS_SITE`; other builds have none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectHook(MetadataHookInterface):
    """Fills in the dynamic fields. The table `extras` of this hook's configuration in pyproject.toml has the extras."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the extras and the README; in a release, also addresses, to which relative links of the README then lead."""
        native = f"kvevents-native=={metadata['version']}"
        extras = {name: list(requirements) for name, requirements in self.config["extras"].items()}
        for name in self.config["needs-native"]:
            extras.setdefault(name, []).append(native)
        extras["plane"] = [f"kvevents-plane=={metadata['version']}"]
        extras["all"] = sorted({requirement for requirements in extras.values() for requirement in requirements})
        metadata["optional-dependencies"] = extras
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("KVEVENTS_REPOSITORY"):
            tree = f"{repository}/blob/v{metadata['version']}"
            readme = re.sub(r"\]\((?!https?:|#)", f"]({tree}/", readme)
            metadata["urls"] = {
                "Source": repository,
                "Changelog": f"{tree}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Security": f"{repository}/security/policy",
            }
            if site := os.environ.get("KVEVENTS_SITE"):
                metadata["urls"]["Documentation"] = site
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
