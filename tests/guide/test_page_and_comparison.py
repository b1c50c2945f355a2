"""The guide's tests' reading of a page, and their comparison of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison import Comparison
from page import Cell, CloseBrowser, Command, File, NotAPage, steps


def written(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_all_kinds_of_steps_in_their_order(tmp_path):
    page = written(
        tmp_path,
        "# Title\n\n```console\nhub# one\nhub# two --x\nsays\n\nthis\n```\n\n```ini\n# /etc/a.conf\nb = 1\n```\n"
        "```ipython\nIn [3]: x\nOut[3]: 4\n```\nShe goes.<!-- the browser is closed -->\n",
    )
    assert steps(page) == [
        Command(4, "hub", "one", ""),
        Command(5, "hub", "two --x", "says\n\nthis"),
        File(11, "/etc/a.conf", "# /etc/a.conf\nb = 1\n"),
        Cell(16, 3, "x", "Out[3]: 4"),
        CloseBrowser(19),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```\nhub# one\n```\n",
        "```sh\none\n```\n",
        "```python\nimport this\n```\n",
        "```console\nan output\nhub# one\n```\n",
        "- a list\n  ```console\n  hub# one\n  ```\n",
    ],
    ids=["no language", "another language", "a file without a path", "an output of nothing", "indented"],
)
def test_what_cannot_be_followed_is_not_passed_over(tmp_path, text):
    with pytest.raises(NotAPage):
        steps(written(tmp_path, text))


SAME = [
    ("", ""),
    ("...", ""),
    ("...\nlast", "first\nsecond\nlast"),
    ("first\n...\nlast", "first\nlast"),
    ("CRIU 4.2.1 (unpacked): /opt/...", "CRIU 4.3 (unpacked): /opt/criu"),
    ("ok    disk   53.6 GiB free", "ok  disk   7 GiB free"),
    (
        "[I 2026-11-21 11:38:14.741 IdleCuller culler:90] Server /user/ann/ may be culled: 1 kernels asleep, 35 MiB",
        "[I 2027-01-02 01:02:03.004 IdleCuller culler:91] Server /user/ann/ may be culled: 1 kernels asleep, 36 MiB",
    ),
    ("Progress", "10 %\rProgress"),
    ("plain", "\x1b[32mplain\x1b[0m\r\n"),
]
OTHER = [
    ("", "a warning"),
    ("it works", ""),
    ("it works", "it works\nbut"),
    ("1 kernels asleep", "2 kernels asleep"),
    ("ok    linux", "FAIL  linux"),
    ("at http://127.0.0.1:8000", "at http://127.0.0.1:9000"),
    ("asleep, 35 MiB", "asleep, 35"),
    ("first\n...\nlast", "last\nfirst"),
]


@pytest.mark.parametrize(("shown", "printed"), SAME)
def test_what_differs_from_day_to_day_may_differ(shown, printed):
    assert Comparison().difference(shown, printed) is None


@pytest.mark.parametrize(("shown", "printed"), OTHER)
def test_anything_else_may_not(shown, printed):
    assert Comparison().difference(shown, printed) is not None


def test_a_name_stands_for_the_same_thing_on_the_whole_page():
    comparison = Comparison()
    assert comparison.difference("12345 jupyterhub-sing", "777 jupyterhub-sing") is None
    assert comparison.difference("12345 jupyterhub-sing", "777 jupyterhub-sing") is None
    assert comparison.difference("12345 jupyterhub-sing", "778 jupyterhub-sing") is not None
    assert comparison.difference("pid 12345 and 12345", "pid 777 and 777") is None
    assert comparison.difference("pid 55555 and 55555", "pid 778 and 779") is not None


def test_two_names_may_not_stand_for_one_thing():
    comparison = Comparison()
    assert comparison.difference("12345 one", "777 one") is None
    assert comparison.difference("54321 two", "777 two") is not None
