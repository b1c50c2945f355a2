"""The files about the project: links, named commands and files exist; forms and citation are well formed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jupyter_gpu_ckpt import __version__

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(
        ROOT / f"{name}.md"
        for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT", "RELEASE", "AGENTS", "CHANGELOG")
    ),
    ROOT / ".github/PULL_REQUEST_TEMPLATE.md",
]
FORMS = [ROOT / ".github/ISSUE_TEMPLATE" / name for name in ("defect.yml", "wish.yml")]
#: Keys of the citation file format, 1.2.0, that must be there, and all that we use.
CITED, KNOWN = {"cff-version", "message", "title", "authors"}, {"abstract", "type", "version", "license", "keywords"}


def code(text: str) -> list[str]:
    """Return what a page marks as code: lines of blocks and words between backticks."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [*(line for block in blocks for line in block.splitlines()), *re.findall(r"`([^`\n]+)`", rest)]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_and_files_that_are_named_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page.read_text()):
        if made := re.match(r"make ([a-z-]+)", line):
            assert made[1] in targets, line
        for named in re.findall(r"(?<![\w/])(?:scripts|tests|docs|packaging|jupyter_gpu_ckpt)/[\w./-]+", line):
            assert (ROOT / named).exists(), line


def test_no_file_is_unfinished():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.endswith((".md", ".cff", ".yml", ".yaml")):
            found = re.search(r"\b(TODO|FIXME|XXX|TBD)\b|lorem ipsum", (ROOT / name).read_text())
            assert found is None, (name, found)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_no_paragraph_is_longer_than_a_reader_follows(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", text):
        assert len(" ".join(paragraph.split())) <= 600, paragraph


def test_the_citation_has_what_the_format_demands():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited.keys() >= CITED and cited.keys() - CITED <= KNOWN
    assert cited["cff-version"] == "1.2.0" and cited["version"] == __version__ and cited["type"] == "software"
    assert cited["authors"] and all(author.get("name") or author.get("family-names") for author in cited["authors"])
    assert len(set(cited["keywords"])) == len(cited["keywords"])


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one(form):
    """By GitHub's syntax for issue forms: unique ids and labels, at least one field, known types."""
    document = yaml.safe_load(form.read_text())
    assert document.keys() == {"name", "description", "labels", "body"}
    fields = [part for part in document["body"] if part["type"] != "markdown"]
    assert fields
    assert {part["type"] for part in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    for key in (lambda part: part["id"], lambda part: part["attributes"]["label"]):
        assert len({key(part) for part in fields}) == len(fields)
    for part in fields:
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        assert part["type"] != "dropdown" or len(part["attributes"]["options"]) > 1


def test_the_newest_section_of_the_changelog_is_this_version():
    sections = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0][0] == __version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date) for _, date in sections)


def test_the_way_to_a_passing_change_runs_one_quick_file_and_not_the_suite():
    """CONTRIBUTING promises minutes: what takes longer comes after them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    way = text.partition("## From a clone to a passing change\n")[2].partition("\n## ")[0]
    commands = re.search(r"```bash\n(.*?)```", way, re.DOTALL)[1].splitlines()
    assert [command.split()[0:2] for command in commands if "make" in command] == [["make", "demo"], ["make", "lint"]]
    (first,) = set(re.findall(r"pytest (tests/\S+\.py)", "\n".join(commands)))
    source = (ROOT / first).read_text()
    assert "mark.slow" not in source and "mark.torture" not in source and "criu_binary" not in source
    before, _, after = way.partition("You can send it now.")
    assert "make test" not in before and "make test-fast" in after
