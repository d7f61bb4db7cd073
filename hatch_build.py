"""Adds the extras to the metadata of `kvevents`. Those that use the compiled package require the same version of it."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ExtrasHook(MetadataHookInterface):
    """Fills in `optional-dependencies` from the table `extras` of this hook's configuration in pyproject.toml."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Append `kvevents-native` to each extra named by `needs-native`, and add the extra `all`."""
        native = f"kvevents-native=={metadata['version']}"
        extras = {name: list(requirements) for name, requirements in self.config["extras"].items()}
        for name in self.config["needs-native"]:
            extras.setdefault(name, []).append(native)
        extras["all"] = sorted({requirement for requirements in extras.values() for requirement in requirements})
        metadata["optional-dependencies"] = extras
