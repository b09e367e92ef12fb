"""MkDocs hooks: links that leave docs/ for another file of the repository.

Pages link to such files relatively (``../benchmarks/results/x.json``), so that the links work in a
checkout too. The site gets a copy of every file that is linked, and CONTRIBUTING.md and
CHANGELOG.md as pages.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")  # of the repository's root
LINK = re.compile(r"(\]\()([^)#:\s]+)([)#])")
COPIES = "repository"

log = logging.getLogger("mkdocs.plugins.repository_links")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # Where the page's text lies in the repository, and where it will stand in the site.
    here = ROOT if page.file.src_uri in PAGES else pathlib.Path(config.docs_dir)
    folder = (here / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = pathlib.Path(os.path.normpath(folder / target))
        if path.is_relative_to(config.docs_dir):
            new = path.relative_to(config.docs_dir).as_posix()
        elif not path.is_file() or not path.is_relative_to(ROOT):
            log.warning(
                "%s links to %s, which is no file of the repository", page.file.src_uri, target
            )
            return match[0]
        else:
            new = path.relative_to(ROOT).as_posix()
            if new not in PAGES:
                new = f"{COPIES}/{new}"
                if files.get_file_from_path(new) is None:
                    files.append(File.generated(config, new, abs_src_path=str(path)))
        start = pathlib.PurePosixPath(page.file.src_uri).parent.as_posix()
        return before + os.path.relpath(new, start) + after

    return LINK.sub(replace, markdown)
