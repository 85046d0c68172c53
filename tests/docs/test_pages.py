"""The documents tell the truth: links lead somewhere, examples resolve, commands and keys exist."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from docs.make_coverage import page as coverage
from docs.make_keys import with_table
from fivefold.axes.checks import check
from fivefold.cli import app
from fivefold.config import Job, list_keys, load, resolve, sort_words
from tests.test_rooms import ABOVE_ALL, EVERYONE_MAY_IMPORT, MAY_IMPORT

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PACKAGE = ROOT / "src" / "fivefold"
OURS = ("src", "tests", "docs", "benchmarks", "examples")
KEYS = {key.name for key in list_keys()}
WRONG_ON_PURPOSE = {"training.stpes"}

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def links(text: str) -> list[str]:
    """Targets of Markdown links and pictures, outside of code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing(link: str, path: Path) -> bool:
    """Whether a link on the page at `path` leads nowhere in this project. Other sites are not asked."""
    if link.startswith(("http://", "https://")):
        return False
    target, _, anchor = link.partition("#")
    place = path.parent / target if target else path
    if not place.exists():
        return True
    return bool(anchor) and anchor not in anchors(place.read_text())


def keys_named(text: str) -> set[str]:
    """Whatever looks like a key of a job: a section's name, a dot, a word that is not a file's ending."""
    sections = "|".join(Job.model_fields)
    return set(
        re.findall(
            rf"(?<![\w./-])(?:--)?((?:{sections})\.(?!(?:md|py|safetensors)\b)[a-z_]+)(?![\w/(])", text
        )
    )


def commands(text: str) -> list[list[str]]:
    """The words of every `fivefold ...` command in code, without placeholders for words."""
    blocks = "\n".join(re.findall(r"```(?:console|sh|)\n(.*?)```", text, flags=re.DOTALL))
    lines = (blocks + "\n" + "\n".join(spans(text))).replace("\\\n", " ")
    found = re.findall(
        r"^(?:\$ )?(?:.* -m |srun .*|python -m )?fivefold +([a-z].*)$", lines, flags=re.MULTILINE
    )
    return [shlex.split(line, comments=True) for line in found]


def spans(text: str) -> list[str]:
    """Code within lines, between backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def absent(text: str) -> list[str]:
    """Files and folders of ours that are named between backticks and do not exist.

    A path starts at the root or in the package, a file without a folder is anywhere; `*` and X stand for any
    name. What a run leaves (`storage/`) is not ours: its first folder is neither at the root nor in the
    package.
    """
    found = []
    for written in spans(text):
        span = re.sub(r"\bX(?=[._])", "*", written)
        if re.fullmatch(r"[\w*-]+\.py", span):
            exists = any(next(ROOT.glob(f"{folder}/**/{span}"), None) for folder in OURS)
        elif re.fullmatch(r"[\w*-]+(/[\w.*-]+)*/?", span) and "/" in span:
            homes = [home for home in (ROOT, PACKAGE) if (home / span.split("/")[0]).is_dir()]
            exists = any(next(home.glob(span.rstrip("/")), None) for home in homes)
            exists = exists or not (homes or span.endswith(".py"))
        else:
            continue
        if not exists:
            found.append(written)
    return found


@page
def test_paths_exist(path: Path) -> None:
    assert absent(path.read_text()) == []


@page
def test_imports_that_are_shown_work(path: Path) -> None:
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
    for module, names in re.findall(r"^from (fivefold[\w.]*) import ([\w, ]+)$", blocks, flags=re.MULTILINE):
        for name in names.split(", "):
            assert hasattr(import_module(module), name), f"from {module} import {name}"


@pytest.mark.parametrize("name", ["ledger.md", "memory.md"])
def test_the_first_program_of_a_page_prints_what_is_shown(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / name).read_text()
    shown = re.search(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", text, flags=re.DOTALL)
    assert shown is not None
    exec(compile(shown[1], name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed == (shown[2] or shown[1].rpartition("# ")[2])


@page
def test_links_lead_somewhere(path: Path) -> None:
    assert [link for link in links(path.read_text()) if missing(link, path)] == []


@page
def test_keys_exist(path: Path) -> None:
    assert keys_named(path.read_text()) - KEYS - WRONG_ON_PURPOSE == set()


@page
def test_commands_and_their_options_exist(path: Path) -> None:
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for verb, *words in commands(path.read_text()):
        assert verb in verbs, f"fivefold {verb}"
        command = getattr(verbs[verb], "commands", {}).get(words[0] if words else "", verbs[verb])
        options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name.removeprefix("--") not in KEYS | WRONG_ON_PURPOSE:
                assert name in options, f"fivefold {verb} {name}"


@page
def test_job_files_shown_are_jobs(path: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", path.read_text(), flags=re.DOTALL):
        tree = tomllib.loads(block)
        job = Job.model_validate(tree)
        resolve(job, ranks=1)


def test_the_table_of_rooms_says_what_rooms_may_import() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    above: set[str] = set()
    row = r"^\| (`[^|]+`) \|[^|]+\| ?([^|]*?) ?\|$"
    for rooms, imports in re.findall(row, section(text, "The rooms"), flags=re.MULTILINE):
        for room in re.findall(r"`(\w+)(?:/|\.py)`", rooms):
            every = {"every room above": above, "anything": set(MAY_IMPORT) | ABOVE_ALL}
            listed = {name for name in imports.split(", ") if name}
            may = set(MAY_IMPORT) | ABOVE_ALL if room in ABOVE_ALL else MAY_IMPORT[room]
            assert every.get(imports, listed) == may, room
            above = above | {room}
    assert above == (MAY_IMPORT.keys() | ABOVE_ALL) - EVERYONE_MAY_IMPORT - {"__init__", "__main__"}


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return re.split(r"^## ", text.split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_resolve(path: Path) -> None:
    job = load(str(path))
    layout = job.layout
    degrees = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp)
    ranks = math.prod(degree or 1 for degree in degrees)
    resolved = resolve(job, ranks, "cuda")
    assert resolve(resolved, ranks, "cuda") == resolved
    assert check(resolved) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_commands_in_examples_name_existing_keys(path: Path) -> None:
    comments = "\n".join(
        line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#")
    )
    joined = comments.replace("\\\n", " ")
    for line in re.findall(r"fivefold ((?:train|verify) .*)$", joined, flags=re.MULTILINE):
        files, settings = sort_words([word for word in shlex.split(line) if word != "--nproc"][1:])
        assert (ROOT / files[0]).exists()
        assert {key for key, _ in settings} <= KEYS


def test_the_table_of_keys_is_up_to_date() -> None:
    text = (ROOT / "docs" / "jobs.md").read_text()
    assert with_table(text) == text, "run: python docs/make_keys.py"


def test_the_table_of_coverage_is_up_to_date() -> None:
    text = (ROOT / "docs" / "coverage.md").read_text()
    assert coverage() == text, "run: python -m docs.make_coverage"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see [a](no/such.md)", ["no/such.md"]),
        ("see [a](README.md#no-such-heading)", ["README.md#no-such-heading"]),
        ("see [a](README.md#a-first-tour), [b](https://example.com/x) and `[c](no)`", []),
        ("![picture](docs/pictures/none.svg)", ["docs/pictures/none.svg"]),
    ],
)
def test_a_dead_link_is_found(text: str, found: list[str]) -> None:
    assert [link for link in links(text) if missing(link, ROOT / "README.md")] == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`axes/pieces.py`, `tests/axes/`, `docs/*.md`, `pieces.py`, `axes/runtime/X_split.py`", []),
        ("`checkpoints/step-N` of a run, `fivefold/nothing`, and axes/no_such.py without backticks", []),
        ("`axes/no_such.py`", ["axes/no_such.py"]),
        ("`no_such.py`, `no_such_room/file.py`", ["no_such.py", "no_such_room/file.py"]),
        ("`tests/no_such/`, `planner/no_such.json`", ["tests/no_such/", "planner/no_such.json"]),
    ],
)
def test_an_absent_path_is_found(text: str, found: list[str]) -> None:
    assert absent(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`training.step` and `--layout.zero 3`", {"training.step", "layout.zero"}),
        ("[data.md](data.md), axes/data.py, fivefold.training.metrics, training/step.py", set()),
    ],
)
def test_keys_are_found_in_text(text: str, found: set[str]) -> None:
    assert keys_named(text) == found


def test_commands_are_found_in_text() -> None:
    text = (
        "`fivefold keys` and\n```console\n$ torchrun -m fivefold train a.toml --nproc 2 # why\nother\n```\n"
    )
    assert commands(text) == [["train", "a.toml", "--nproc", "2"], ["keys"]]
