"""Settings of the documentation site: ``make docs`` writes it to ``build/docs``."""

import csv
import os
import re
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import slapo

project = "Slapo"
author = copyright = "The Slapo developers"
release = version = slapo.__version__
root_doc = "README"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["gallery"]
html_theme = "furo"
html_title = f"Slapo {version}"
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "config.cache"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    # That program starts processes, which import the main one: it is shown without its output.
    "filename_pattern": r"/(?!mlp_on_several)\w+\.py$",
    "ignore_pattern": "__init__",
    "download_all_examples": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "within_subsection_order": "FileNameSortKey",
}


def _table(match):
    """The named columns of a file of benchmark/results, as a table."""
    path = Path(__file__).parent.parent / f"benchmark/results/{match[1]}.csv"
    columns = match[2].split(", ")
    lines = [columns, ["---"] * len(columns)]
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            cells = (row[column].partition("\n")[0] for column in columns)
            lines.append([re.sub(r"([|<*_`\[])", r"\\\1", cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _for_the_site(app, name, source):
    """Lead links of the repository to pages of the site, and show other paths as they are."""
    text = source[0]
    text = re.sub(r"<!-- table (\w+): (.*) -->", _table, text)
    text = re.sub(r"\]\(gallery/(\w+)\.py\)", r"](auto_gallery/\1.rst)", text)
    text = re.sub(r"\[([^]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)", r"\1 (`\2`)", text)
    if name == root_doc:
        pages = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\)", text, re.M)
        toc = "\n".join([*pages, "auto_gallery/index", "api"])
        text += f"\n```{{toctree}}\n:hidden:\n:caption: Guides\n\n{toc}\n```\n"
    source[0] = text


def setup(app):
    app.connect("source-read", _for_the_site)
