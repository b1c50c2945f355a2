"""The documents match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_tables_made_from_the_code_are_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "make-docs"), "--check"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https:)([^)#]+)[^)]*\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_page_names_exists(document):
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", document.read_text())
    assert document.name not in ("threat-model.md", "hardening.md") or len(named) > 10
    for file, name in named:
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), (file, name)


#: The items of the report of 2026-11-22, by the letter of their section.
REPORTED = {"A": 13, "B": 6, "C": 6, "D": 8, "E": 4}


def _defects() -> list[list[str]]:
    text = (ROOT / "docs" / "hardening.md").read_text()
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE)]
    return [row for row in rows if row[0] != "item"]


def test_every_defect_that_was_found_has_a_test_and_a_commit():
    rows = _defects()
    assert [row for row in rows if len(row) != 5 or "`tests/" not in row[3]] == []
    assert [row for row in rows if not re.fullmatch(r"[0-9a-f]{7}(, [0-9a-f]{7})*", row[4])] == []
    reported = {f"{letter}{number}" for letter, last in REPORTED.items() for number in range(1, last + 1)}
    assert reported - {row[0] for row in rows} == set()


def test_commits_that_the_table_of_defects_names_exist():
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no clone with its history")
    named = sorted({commit for row in _defects() for commit in row[4].split(", ")})
    assert [commit for commit in named if git("cat-file", "-e", f"{commit}^{{commit}}").returncode != 0] == []


@pytest.mark.parametrize("page", ["architecture", "performance", "threat-model", "hardening", "usability"])
def test_every_file_that_a_page_names_exists(page):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    files = ["/" + name for name in listed.splitlines() if (ROOT / name).exists()]
    named = re.findall(r"`([\w/-]+\.(?:py|c|h))\b", (ROOT / "docs" / f"{page}.md").read_text())
    assert page == "performance" or named
    missing = {name for name in named if not any(file.endswith("/" + name) for file in files)}
    assert not missing


def test_the_map_has_every_folder_of_the_package():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Processes")[0]
    folders = {init.parent.name for init in (ROOT / "jupyter_gpu_ckpt").glob("*/__init__.py")}
    assert {name for name in folders if f"`{name}/`" not in table} == set()


def test_the_table_of_threads_has_every_name_of_a_thread():
    page, named = (ROOT / "docs" / "architecture.md").read_text(), set()
    for path in (ROOT / "jupyter_gpu_ckpt").rglob("*.py"):
        if "testing" not in path.parts:
            text = path.read_text()
            named |= set(re.findall(r"Thread\([^\n]*name=f?\"([\w-]+)", text))
            named |= set(re.findall(r"thread_name_prefix=f?\"([\w-]+)", text))
            named |= set(re.findall(r"(?:BackgroundTask\(\s*|ThreadPoolExecutor\(.*, |Worker\()f?\"([\w-]+)", text))
    assert len(named) > 12
    assert {name for name in named if f"`{name}" not in page} == set()


def test_every_make_target_the_readme_names_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`?make ((?:[\w-]+ ?)+)", (ROOT / "README.md").read_text())
    words = {word for line in named for word in line.split()} - {"sets", "prints"}
    assert {"demo", "test"} <= words
    assert words & targets >= {"demo", "test", "gpu-bundle", "gpu-check"}


def test_subcommands_in_the_usage_exist():
    command = [sys.executable, "-m", "jupyter_gpu_ckpt", "--help"]
    help = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for name in re.findall(r"^\| `jupyter gpu-ckpt ([\w-]+)", (ROOT / "docs" / "usage.md").read_text(), re.MULTILINE):
        assert re.search(rf"^\s+{name}\b", help, re.MULTILINE), name


def test_no_paragraph_is_longer_than_a_reader_follows():
    for page in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        text = re.sub(r"```.*?```|<!-- from .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        for block in re.split(r"\n\s*\n", text):
            for paragraph in re.split(r"\n(?=\s*(?:[-*|]|\d+\.)\s)", block):
                assert paragraph.lstrip().startswith("|") or len(" ".join(paragraph.split())) <= 600, (page, paragraph)


#: For whom pages are, how many pages at most, and how many words outside tables, blocks and what scripts write. The
#: runbook is not read but looked up: its words are not counted.
READERS = {"users": (10, 6200), "administrators": (8, 5200), "engineers": (6, 7500)}


def _listed(section: str) -> list[tuple[str, str]]:
    """Return caption and name of each page in a section of the site."""
    blocks = re.findall(r"```{toctree}\n(.*?)```", (ROOT / "docs" / f"{section}.md").read_text(), re.DOTALL)
    captions = [re.search(r":caption: (.+)", block) for block in blocks]
    return [
        (caption[1] if caption else "", name)
        for caption, block in zip(captions, blocks, strict=True)
        for name in re.findall(r"^[\w/-]+$", block, re.MULTILINE)
    ]


def test_each_reader_has_few_pages():
    """Records are apart: nobody reads them, somebody looks for a date or a figure."""
    sections = [name for _, name in _listed("index")]
    indexes = {"index", *(name for name in sections if _listed(name))}
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix(): path.read_text() for path in DOCUMENTS[1:]}
    records = {name for section in sections for caption, name in _listed(section) if caption == "Records"}
    assert records < pages.keys() and indexes < pages.keys()
    found: dict[str, dict[str, int]] = {reader: {} for reader in READERS}
    for name in pages.keys() - indexes - records:
        opening = re.match(r"# .+\n\nFor (?:new )?(\w+)", pages[name])
        assert opening and opening[1] in READERS, f"{name} does not begin with its readers"
        text = re.sub(r"```.*?```|<!-- from .*?<!-- end -->|^\|.*?$", "", pages[name], flags=re.DOTALL | re.MULTILINE)
        found[opening[1]][name] = len(text.split())
    for reader, (most_pages, most_words) in READERS.items():
        assert len(found[reader]) <= most_pages, (reader, sorted(found[reader]))
        words = sum(count for name, count in found[reader].items() if name != "admin/runbook")
        assert words <= most_words, (reader, words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_heading_and_no_paragraph_stands_twice_on_a_page(document):
    """Two branches that have moved a section leave it twice after their merge."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ .+$", text, re.MULTILINE)
    paragraphs = [block for block in text.split("\n\n") if len(block) > 100]
    for parts in (headings, paragraphs):
        assert sorted(parts) == sorted(set(parts)), {part[:60] for part in parts if parts.count(part) > 1}


def test_usage_has_the_words_of_each_state_that_is_lost_and_documented():
    """Words by which `tests/zoo` lets a change after a wake pass, because the page has them."""
    section = (ROOT / "docs" / "usage.md").read_text().partition("## What comes back, and what does not\n")[2]
    section = section.partition("\n## ")[0]
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "zoo" / "kinds").glob("*.py"))
    words = set(re.findall(r'documented\("(.+?)"\)', sources))
    assert len(words) > 4
    assert {word for word in words if word not in section} == set()
