"""The documentation as a site, built by Sphinx: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jupyter_gpu_ckpt import __version__

project = "jupyter_gpu_ckpt"
author = "The jupyter_gpu_ckpt developers"
version = release = __version__

extensions = ["myst_parser", "sphinx_design"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings, as in a repository's pages
# `make docs` fails for each warning
nitpicky = True

# `make linkcheck` asks each address outside of the site once more before it is called broken.
linkcheck_retries = 2
linkcheck_timeout = 20

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 5,
    "navbar_align": "left",
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": []}
