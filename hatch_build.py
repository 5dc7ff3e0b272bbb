"""Metadata of a built distribution: the project's address, and a README whose links lead there.

The address comes from $REPOSITORY_URL, such as https://host/owner/headway, since the sources do not know where they are
published. On a package index nothing stands beside README.md, so that its relative links lead nowhere. Without the
variable the README is taken as it is, and a distribution has no address.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"((?:\]\(|href=\"))(?!\w+:|#)([^)\s\"]+)")
_PICTURE = re.compile(r"(!\[[^]]*\]\(|(?:src|srcset)=\")(?!\w+:)([^)\s\"]+)")


class ReadmeHook(MetadataHookInterface):
    """Fills `readme` and `urls` of the project, which pyproject.toml leaves to the build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address := os.environ.get("REPOSITORY_URL", "").rstrip("/"):
            text = with_absolute_links(text, address)
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/blob/main/docs/index.md",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, address: str) -> str:
    """Lead the relative links of a page of Markdown to a repository: pictures to the files themselves.

    Args:
        text: the page, which lies in the repository's root.
        address: of the repository, without a slash at its end.
    """
    text = _PICTURE.sub(rf"\g<1>{address}/raw/main/\g<2>", text)
    return _LINK.sub(rf"\g<1>{address}/blob/main/\g<2>", text)
