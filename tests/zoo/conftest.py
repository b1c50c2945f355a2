"""The keepers of the zoo, and the table that is written of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeper import TOGETHER, packs
from keeping import EVERYBODY, users
from kinds import all_kinds
from table import DOCUMENT, table


def pytest_addoption(parser):
    parser.addoption(
        "--zoo-table", action="store_true", help=f"Write {Path(DOCUMENT).name} from what this run finds; for all kinds."
    )


@pytest.fixture(scope="session")
def zoo(criu_binary, request):
    """All users by name, "root" and "user"; with ``--zoo-table`` their findings are written down in the end."""
    with users(criu_binary) as made:
        yield made
        if request.config.getoption("--zoo-table"):
            found = {who: user.outcomes for who, user in made.items()}
            missing = [
                key
                for who in EVERYBODY
                for key, kind in all_kinds().items()
                if not (key in found[who] or kind.lacking())
            ]
            assert not missing, f"the table needs all kinds (no -m, no -k): {missing}"
            DOCUMENT.write_text(table(all_kinds(), found))


@pytest.fixture(scope="module")
def wanted(request):
    """The kinds that this module tests, by user, in the order in which they are run: those of one kernel together."""
    kinds, keys = all_kinds(), {who: [] for who in EVERYBODY}
    for item in request.session.items:
        chosen = getattr(item, "callspec", None)
        if chosen is not None and item.module is request.module and "key" in chosen.params:
            keys.get(chosen.params["who"], []).append(chosen.params["key"])
    groups = {}
    for who, chosen in keys.items():
        shared, single = packs([kinds[key] for key in chosen if not kinds[key].lacking()], who)
        groups[who] = [*shared, *(single[start : start + TOGETHER] for start in range(0, len(single), TOGETHER))]
    return groups
