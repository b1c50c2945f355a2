"""The administrators' guide for one machine, followed literally on an empty one: the page itself is the input.

Every command is typed as the page has it, every file is written, every cell is run in a browser, in the page's order;
whatever prints something else than the page shows is a failure of the page or of the product.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reader import REPOSITORY, Reader

PAGE = REPOSITORY / "docs" / "admin" / "bare-metal.md"


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_the_page_is_followed_from_an_empty_machine(empty_machine, tmp_path: Path):
    logs = "journalctl --unit=jupyterhub --output=cat --lines=400"
    Reader(PAGE, empty_machine("hub"), tmp_path, "hub", logs=logs).read()
