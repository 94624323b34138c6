"""README is short and leads to all of docs/, and README.zh-CN.md is the same page in Chinese."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
ENGLISH = TOP / "README.md"
CHINESE = TOP / "README.zh-CN.md"
DOCS = TOP / "docs"
PAGES = [ENGLISH, CHINESE, *sorted(DOCS.glob("*.md"))]

FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]+`")
MARK = "[...]"  # lines of an output that are left out


def relative(path: Path) -> str:
    return str(path.relative_to(TOP))


def targets(text: str) -> list[str]:
    """Where the links and pictures of a text lead."""
    return LINK.findall(FENCE.sub("", text))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


@dataclass(frozen=True)
class Page:
    """What a translation has in common with what it translates."""

    headings: list[int]
    blocks: list[str]
    tables: list[list[list[list[str]]]]
    figures: list[list[list[str]]]
    code: list[list[str]]
    links: list[list[str]]
    paragraphs: list[list[str]]


def kind(paragraph: str) -> str:
    """A list with so many items, a table, a picture, or just a paragraph."""
    if paragraph.startswith("- "):
        return f"{len(re.findall(r'(?m)^- ', paragraph))} items"
    return {"|": "table", "!": "picture"}.get(paragraph[0], "text")


def page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    blocks = FENCE.findall(text)
    prose = FENCE.sub("(code)", text)
    sections = re.split(r"(?m)^(?=#+ )", prose)[1:]
    tables = [[cells(line) for line in table.splitlines()] for table in re.findall(r"(?m)(?:^\|.*\|\n)+", prose + "\n")]
    return Page(
        headings=[len(marks) for marks in re.findall(r"(?m)^(#+) ", prose)],
        blocks=blocks,
        tables=[[[sorted(CODE.findall(cell)) for cell in row] for row in table] for table in tables],
        figures=[[sorted(re.findall(r"\d[\d,.]*\d|\d", cell)) for cell in row] for table in tables for row in table],
        code=[sorted(CODE.findall(part)) for part in sections],
        links=[sorted(LINK.findall(part)) for part in sections],
        paragraphs=[[kind(each) for each in re.split(r"\n{2,}", part.strip())] for part in sections],
    )


def switch(path: Path) -> str:
    """The line at the top that leads to the other language."""
    return path.read_text(encoding="utf-8").splitlines()[2]


def test_each_language_leads_to_the_other() -> None:
    assert switch(ENGLISH) == "English | [中文](README.zh-CN.md)"
    assert switch(CHINESE) == "[English](README.md) | 中文"


@pytest.mark.parametrize("what", ["headings", "blocks", "tables", "figures", "code", "paragraphs"])
def test_the_chinese_readme_is_that_of_the_english_one(what: str) -> None:
    assert getattr(page(CHINESE), what) == getattr(page(ENGLISH), what)


def test_the_chinese_readme_has_the_same_links() -> None:
    (switch_there, *there), (switch_here, *here) = page(CHINESE).links, page(ENGLISH).links
    assert there == here
    assert (switch_there, switch_here) == (["README.md"], ["README.zh-CN.md"])


def test_the_chinese_readme_is_in_chinese() -> None:
    text = FENCE.sub("", CHINESE.read_text(encoding="utf-8"))
    for paragraph in re.split(r"\n{2,}", text.strip())[2:]:
        assert re.search(r"[\u4e00-\u9fff]", paragraph), paragraph


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_link_to_a_file_of_the_repository_leads_to_one(path: Path) -> None:
    found = targets(path.read_text(encoding="utf-8"))
    for target in found:
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target.partition("#")[0]).resolve() if not target.startswith("#") else path
        assert file.is_file() or (file / "README.md").is_file(), target
        assert file.is_relative_to(TOP), target


def test_readme_leads_to_every_page_and_picture_of_docs() -> None:
    linked = {target.partition("#")[0] for target in targets(ENGLISH.read_text(encoding="utf-8"))}
    missing = {relative(path) for path in DOCS.glob("*.md")} - linked
    assert not missing
    everywhere = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in PAGES
        for target in targets(path.read_text(encoding="utf-8"))
    }
    assert set(DOCS.glob("*.svg")) <= everywhere


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_files_of_the_repository_that_are_named_are_there(path: Path) -> None:
    for name in re.findall(r"`((?:tests|tools|src|examples|docs)/[\w./-]+)`", path.read_text(encoding="utf-8")):
        assert (TOP / name).exists(), name


def test_readme_is_short() -> None:
    assert len(ENGLISH.read_text(encoding="utf-8").splitlines()) <= 250


def test_the_demo_in_readme_is_cut_from_the_whole_output() -> None:
    short = FENCE.findall(ENGLISH.read_text(encoding="utf-8"))[0].splitlines()
    whole = iter(FENCE.findall((DOCS / "performance.md").read_text(encoding="utf-8"))[0].splitlines())
    assert MARK in short
    cut = False
    for line in short:
        if line == MARK:
            cut = True
            continue
        for skipped, other in enumerate(whole):
            if other == line:
                assert bool(skipped) == cut, line
                break
        else:
            raise AssertionError(f"not in the whole output, or not there: {line}")
        cut = False
    assert not cut
    assert next(whole, None) is None


def test_the_settings_of_clients_are_those_of_the_docs() -> None:
    there = FENCE.findall((DOCS / "clients.md").read_text(encoding="utf-8"))
    here = [block for block in FENCE.findall(ENGLISH.read_text(encoding="utf-8")) if re.match("```(toml|json)", block)]
    assert len(here) == 2
    assert set(here) <= set(there)
