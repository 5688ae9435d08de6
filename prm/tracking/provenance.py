"""Where a result comes from, as tags of a run."""

from __future__ import annotations

import sys

from prm.provenance import git_revision, package_versions, user_name
from prm.tracking.masking import command_line


def provenance_tags(data_fingerprint: str | None = None) -> dict[str, str]:
    """Tags every run carries: versions (`prm.version.<package>`), revision, command without secrets, data."""
    tags = {f"prm.version.{name}": version for name, version in package_versions().items()}
    tags["mlflow.user"] = user_name()
    tags["prm.command"] = command_line(sys.argv)[:5000]
    if (revision := git_revision()) is not None:
        tags["prm.git_revision"] = revision
    if data_fingerprint is not None:
        tags["prm.data_fingerprint"] = data_fingerprint
    return tags
