"""Hooks of mkdocs: a copy of the package without symbolic links, which griffe does not follow; links out of docs/."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\[([^\]]+)\]\(([^):#]+)(?:#[^)]*)?\)")


def on_startup(**_: Any) -> None:
    """Copy the sources of the package to build/source, where `paths` of mkdocs.yml finds them."""
    root = Path(__file__).parents[2]
    target = root / "build/source/graftlm"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "graftlm", target, ignore=lambda _, names: [n for n in names if not _is_source(n)])
    for folder in {path.parent for path in target.rglob("*.py")} | set(target.iterdir()):
        if folder.is_dir():
            (folder / "__init__.py").touch()  # griffe looks for names below packages only


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page in the site's dialect of Markdown.

    Links to files that the site does not have become `text (path)`. Code in tables has its pipes without a backslash,
    which GitHub needs and Python-Markdown shows.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        is_outside = target.startswith(("../", "notebooks/"))
        return f"{link[1]} (`{target.removeprefix('../')}`)" if is_outside else link[0]

    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), _LINK.sub(shown, markdown))


def _is_source(name: str) -> bool:
    return name.endswith(".py") or ("." not in name and name != "__pycache__")
