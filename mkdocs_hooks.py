"""Pages of the site that are not in docs/, and links that work both on GitHub and in the site."""

import argparse
import ast
import json
import posixpath
import re
import runpy
from functools import cache
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent
#: Pages that are files elsewhere in the repository.
INCLUDED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{
        f"examples/{file.stem}.md": f"examples/{file.name}"
        for file in sorted(ROOT.glob("examples/*.py"))
    },
    **{
        f"tutorials/{file.stem}.md": f"docs/tutorials/{file.name}"
        for file in sorted(ROOT.glob("docs/tutorials/*.ipynb"))
    },
}
PAGE_OF = {path: page for page, path in INCLUDED.items()}
INSIDE = sorted(ROOT.glob("timm_moe/*/__init__.py"))
#: The packages of the reference, by page.
PACKAGES = {
    "timm_moe": "timm_moe",
    **{file.parent.name: f"timm_moe.{file.parent.name}" for file in INSIDE},
}
#: Modules that are documented beside the names in __all__.
MODULES = {"timm_moe": ["schedules"], "timm_moe.convert": ["gather"]}


def on_files(files, config):
    pages = {page: included(path) for page, path in INCLUDED.items()}
    pages["reference/cli.md"] = command_line(
        runpy.run_path(str(ROOT / "timm_moe_cli.py"))["_COMMANDS"]
    )
    pages |= {f"reference/{page}.md": package_page(name) for page, name in PACKAGES.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, files, **_):
    """Point links to the page of their file, and show its title instead of the file's name.

    A link out of the site is left alone, and --strict finds it.
    """
    here = page.file.src_uri
    folder = posixpath.dirname(INCLUDED.get(here, f"docs/{here}"))

    def rewritten(link):
        words, path, place = link.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        if target not in PAGE_OF and not (target.startswith("docs/") and (ROOT / target).exists()):
            return link[0]
        there = PAGE_OF.get(target, target.removeprefix("docs/"))
        shown = files.get_file_from_path(there).page.title if words.endswith(".md") else words
        return f"[{shown}]({posixpath.relpath(there, posixpath.dirname(here))}{place})"

    return re.sub(r"\[([^][]*)\]\(([^)\s#:]+)((?:#[^)\s]*)?)\)", rewritten, markdown)


def on_page_content(html, **_):
    """Turn roles of docstrings, as :class:`Experts`, into links to the reference."""
    packages = reversed(PACKAGES.values())  # timm_moe itself last: its exports are described there
    known = {
        name: f"{package}.{name}" for package in packages for name in exports(folder_of(package))
    }

    def linked(role):
        name = role[1].removeprefix("~").removesuffix("()")
        shown = f"<code>{name}</code>"
        return f'<autoref optional identifier="{known.get(name, name)}">{shown}</autoref>'

    return re.sub(r":(?:class|func|meth|mod|attr|data|obj):<code>([^<]*)</code>", linked, html)


def included(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        name = posixpath.basename(path)
        link = f'<a href="{name}" download>{name}</a>'
        return f"{notebook(json.loads(text))}\n\nThis page is a notebook: {link}.\n"
    return text if path.endswith(".md") else f"# {path}\n\n```python\n{text}```\n"


def notebook(content):
    """Return the cells of a notebook and their outputs, text and pictures, as Markdown."""
    blocks = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            blocks.append(f"~~~python\n{source}\n~~~")
        blocks += [shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(blocks)


def shown(output):
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    lines = (
        output.get("text")
        or data.get("text/plain")
        or [f"{output.get('ename')}: {output.get('evalue')}"]
    )
    colourless = re.sub(r"\x1b\[[0-9;]*m", "", "".join(lines)).rstrip("\n")
    return f"~~~text\n{colourless}\n~~~"


# --- the command line


def command_line(commands):
    """Return what ``--help`` prints for each command."""
    sections = ["# The command timm-moe", "`timm-moe --version` prints the version."]
    for name, (about, add_options) in commands.items():
        command = argparse.ArgumentParser(
            prog=f"timm-moe {name}",
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80),
        )
        command.color = False  # Python 3.14 colours the help otherwise
        add_options(command)
        sections.append(f"## {name}\n\n```text\n{command.format_help()}```")
    return "\n\n".join(sections)


# --- the Python interface: mkdocstrings fills in the blocks


def package_page(package):
    folder = folder_of(package)
    front = exports(folder_of("timm_moe")) if package != "timm_moe" else []
    names = exports(folder)
    modules = [name for name in names if is_module(folder / name)] if names else submodules(folder)
    own = [name for name in names if name not in (*modules, *front, "__version__")]
    elsewhere = [f"[`{name}`][timm_moe.{name}]" for name in names if name in front]
    blocks = [
        f"# {package} {{#{package}}}",
        f"::: {package}\n    options:\n      members: false\n"
        "      show_root_heading: false\n      show_root_toc_entry: false",
    ]
    if elsewhere:
        blocks.append(f"Also here, and described on the page of timm_moe: {', '.join(elsewhere)}.")
    if package != "timm_moe":  # whose modules are pages
        own += modules
    own += MODULES.get(package, [])
    return "\n\n".join([*blocks, *(f"::: {package}.{name}" for name in own)])


def folder_of(package):
    return ROOT.joinpath(*package.split("."))


@cache
def exports(folder):
    """Return the names in a package's ``__all__``, in its order."""
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def submodules(folder):
    """Return the modules of a package; of packages in it that export nothing, their modules."""
    found = [file.stem for file in folder.glob("[!_]*.py")]
    for inner in (file.parent for file in folder.glob("*/__init__.py")):
        if exports(inner):
            found.append(inner.name)
        else:
            found += [f"{inner.name}.{name}" for name in submodules(inner)]
    return sorted(found)


def is_module(path):
    return path.is_dir() or path.with_suffix(".py").is_file()
