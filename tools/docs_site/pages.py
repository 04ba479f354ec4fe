"""MkDocs hook: pages from outside docs/, and links to files outside docs/.

The Markdown of this repository is read in a checkout as well as on the site. So links to sources
stay as they are in a checkout. On the site, each link leads to a page that shows the file. The API
pages, one for each folder of the package, begin with the modules whose names the folder exports.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "deft_backend"

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages with their Markdown in the root of the repository, and their place on the site."""

API = (
    "attention",
    "forest",
    "policies",
    "costs",
    "planner",
    "kernels",
    "shapes",
    "compile",
    "hosts",
    "telemetry",
    "settings",
    "files",
    "tools",
)
"""Folders and modules of the package with a page of their own, the library's first."""

ENTRY = {"attention": "tree_attention", "forest": "prefix_forest", "planner": "plan"}
"""The module that a reader of the folder's page looks for first."""

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc|const):<code>([^<]*)</code>")
"""A Sphinx role in a docstring; Markdown does not convert it."""

LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".html": "html", ".yml": "yaml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    config.nav.append({"API": [{name: f"api/{name}.md"} for name in API if modules(name)]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in API:
        if found := modules(name):
            content = api_page(name, found)
            files.append(File.generated(config, f"api/{name}.md", content=content))
    for source, place in OUTSIDE.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=content))
    for path in sorted(linked_sources()):
        files.append(File.generated(config, place_of(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    origin = {place: source for source, place in OUTSIDE.items()}.get(page.file.src_uri)
    directory = posixpath.dirname(origin if origin else f"docs/{page.file.src_uri}")

    def on_the_site(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        target = posixpath.normpath(posixpath.join(directory, path))
        place = place_of(target)
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") + anchor

    if page.file.src_uri.startswith(("source/", "api/")):
        return markdown
    return outside_fences(markdown, lambda text: LINK.sub(on_the_site, text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if not page.file.src_uri.startswith("api/"):
        return html
    return ROLE.sub(lambda role: f"<code>{role[1].removeprefix('~').split('.')[-1]}</code>", html)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Change the text outside its code blocks."""
    parts: list[str] = []
    last = 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, change(markdown[last:])])


def place_of(path: str) -> str:
    """The path on the site of a file of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def linked_sources() -> set[str]:
    """Files and folders outside docs/ that any page links to."""
    found = set()
    for page in [*DOCS.rglob("*.md"), *(ROOT / source for source in OUTSIDE)]:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for path, _ in LINK.findall(text):
            target = Path(os.path.normpath(page.parent / path))
            if target.is_relative_to(ROOT) and not target.is_relative_to(DOCS) and target.exists():
                relative = target.relative_to(ROOT).as_posix()
                if relative not in OUTSIDE:
                    found.add(relative)
    return found


def source_page(path: str) -> str:
    """Show a file as a code block, and a folder as a list of its content."""
    target = ROOT / path
    if target.is_dir():
        names = sorted(f"- `{item.name}`" for item in target.iterdir() if item.name[0] not in "._")
        return "\n".join([f"# {path}/", "", *names])
    text = target.read_text(encoding="utf-8")
    # The fence must be longer than any fence in the file.
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(target.suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def modules(name: str) -> list[str]:
    """Dotted names of the modules under a folder of the package: those it exports come first."""
    folder = PACKAGE / name
    if not folder.is_dir():
        return [f"deft_backend.{name}"]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__init__.py"
    ]
    exports = {
        node.module
        for node in ast.parse((folder / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
    }
    first = f"deft_backend.{name}.{ENTRY.get(name)}"
    return sorted(names, key=lambda module: (module != first, module not in exports, module))


def api_page(name: str, found: list[str]) -> str:
    lines = [f"# deft_backend.{name}", ""]
    if (PACKAGE / name).is_dir():
        about = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
        lines += [about or "", ""]
    for module in found:
        lines += [f"## {module.removeprefix('deft_backend.')}", "", f"::: {module}", ""]
    return "\n".join(lines)
