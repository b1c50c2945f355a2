"""Addresses of other sites: well-formed here, where there is no network; whether they answer says `make linkcheck`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
PAGES = [ROOT / name for name in LISTED.stdout.splitlines()]
SITE = ROOT / "docs"


def outside(page: Path) -> list[str]:
    """Return the addresses of other sites that a page links to, also bare ones; blocks and code are examples."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([a-z]+:[^)]*)\)|<([a-z]+://[^>]*)>", text)
    return [link or bare for link, bare in found]


LINKS = sorted({(page.relative_to(ROOT).as_posix(), link) for page in PAGES for link in outside(page)})


def test_pages_link_to_other_sites():
    assert len(LINKS) >= 8
    assert {"criu.org", "docs.nvidia.com"} <= {urlsplit(link).hostname for _, link in LINKS}


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_an_address_is_well_formed(page, link):
    parts = urlsplit(link)
    assert parts.scheme == "https" and parts.port is None and parts.username is None
    assert re.fullmatch(r"(?:[a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), "a host by its full name, in small letters"
    assert not re.search(r"[\s\\<>\"{}|^`]|[.,;]$|//", parts.path), "nothing that belongs to the sentence"
    assert not re.search(r"(?:^|\.)(?:example|invalid|test|localhost)$|example\.", parts.netloc)


def test_the_site_has_every_address_of_other_pages():
    """`make linkcheck` asks for those of the site."""
    checked = {link for page, link in LINKS if page.startswith("docs/")}
    assert {link for _, link in LINKS} - checked == set()


@pytest.mark.slow
def test_linkcheck_asks_for_every_address_and_fails_if_none_answers(tmp_path):
    """In a network namespace without interfaces."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "linkcheck", "-D", "linkcheck_retries=1"]
    alone = ["unshare", "--map-root-user", "--net"]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [*alone, *sphinx, str(SITE), str(tmp_path / "output")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    lines = (tmp_path / "output" / "output.json").read_text().splitlines()
    results = {(each["filename"], each["uri"]): each["status"] for each in map(json.loads, lines)}
    asked = {link for (_, link), status in results.items() if status == "broken"}
    assert asked == {link for page, link in LINKS if page.startswith("docs/")}
    assert done.returncode != 0 and "broken" in done.stderr + done.stdout
