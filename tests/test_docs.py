"""README and docs: the site builds, and every link, option, file and config that they name exists."""

import functools
import importlib.util
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from titanlite.config.loader import tomllib
from titanlite.config.schema import Config

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *DOCS, *sorted((ROOT / "benchmarks").glob("*.md")), ROOT / "verification" / "README.md"]
PAGES += [AGENTS := ROOT / "AGENTS.md"]
PROSE_COLUMNS, README_LINES, AGENTS_LINES = 100, 200, 60
MOST_PAGES, MOST_LINES = 24, 5040
"""Of pages in docs/ that are written by hand. Commands write docs/reference/, docs/testing.md and docs/families.md."""

FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
FRONT_MATTER = re.compile(r"\A---\n.*?^---\n\n", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"^<!-- (\w+): begin -->\n.*?^<!-- \1: end -->\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}
OPTION = re.compile(rf"(?<![\w./])(?:--)?({'|'.join(SECTIONS)})\.(\w+)(?![\w./*])")
GROUP = re.compile(rf"(?<![\w./])({'|'.join(SECTIONS)})\.\{{([\w,\s]+)\}}")
FILE = re.compile(r"(?<![\w./*{}<$-])((?:[\w.-]+/)*[\w-]+\.(?:py|toml|sh))(?![\w/])")
SHIPPED = re.compile(r"titanlite (?:train|plan|parity|config) ([\w./]+)")
EXAMPLES = {"training.seqlen", "optimizer.amsgrad", "training.key"}
"""Options that do not exist: one in examples of error messages, one in the example of adding an option, and the
placeholder in the usage of `titanlite eval`."""
OTHER_PROJECTS = ("kempnerforge/", "litgpt/", "megatron/", "scripts/checkpoint_conversion/")
"""Folders of other projects whose files docs/comparison.md and docs/coming_from_elsewhere.md name."""
SUFFIXES = {"py", "md", "toml", "html", "jsonl", "json", "safetensors"}
"""What follows `model.` or `plan.` in the name of a file."""


# Links


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)}


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of a page whose file or anchor does not exist."""
    broken = []
    images = re.findall(r'(?:src|srcset|href)="([^"\s]+)"', text)
    for target in [*LINK.findall(FENCE.sub("", text)), *images]:
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name
        if name and not file.exists():
            broken.append(target)
            continue
        if anchor and anchor not in anchors(file.read_text() if name else text):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path):
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize(
    "link", ["[a](no.md)", "[a](data.md#no)", "[a](#no)", "![a](images/no.png)", "[a](../no.py)", '<img src="no.svg">']
)
def test_a_broken_link_is_found(link: str):
    text = f"# Title\n\n[a](data.md#the-token-cache), [b](#title), [c](../train.py), [d](https://x.org): {link}\n"
    assert len(broken_links(ROOT / "docs" / "new.md", text)) == 1


# Options


def is_code(module: str, name: str) -> bool:
    """Return whether titanlite has a module or folder that defines a name or contains a module of this name."""
    file, folder = ROOT / "titanlite" / f"{module}.py", ROOT / "titanlite" / module
    definition = rf"^(?:def|class) {name}\b|^{name}\b.*="
    return (folder / f"{name}.py").exists() or (
        file.exists() and bool(re.search(definition, file.read_text(), re.MULTILINE))
    )


def unknown_options(text: str) -> list[str]:
    """Return the options that a page names, as `section.key` or in a TOML block, and that do not exist."""
    unknown = [
        f"{section}.{key}"
        for section, key in OPTION.findall(re.sub(r"^```python.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
        if key not in SECTIONS[section].model_fields
        and not hasattr(SECTIONS[section], key)
        and key not in SUFFIXES
        and not is_code(section, key)
    ]
    for section, keys in GROUP.findall(text):
        unknown += [
            f"{section}.{key.strip()}" for key in keys.split(",") if key.strip() not in SECTIONS[section].model_fields
        ]
    for block in re.findall(r"^```toml.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for section, values in tomllib.loads(block).items():
            fields = SECTIONS[section].model_fields if section in SECTIONS else {}
            unknown += [f"{section}.{key}" for key in values if key not in fields]
    return unknown


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_option_exists(path: Path):
    if path.name == "coming_from_elsewhere.md":
        pytest.skip("it has keys of other programs; test_coming_from_elsewhere.py verifies the column of titanlite")
    assert set(unknown_options(path.read_text())) <= EXAMPLES


@pytest.mark.parametrize(
    "text",
    [
        "`training.stepz`",
        "`--training.stepz=3`",
        "set training.stepz",
        "`model.{dim,n_layer}`",
        "```toml\n[training]\nstepz = 3\n```",
        "```toml\n[trainings]\nsteps = 3\n```",
        "```sh\ntitanlite train debug --optimizer.learning_rate=1\n```",
    ],
)
def test_an_unknown_option_is_found(text: str):
    right = "`training.steps`, optimizer.build_adam, checkpoint.md, `config.training.x`\n\n"
    assert len(unknown_options(right + text + "\n")) == 1


# Files


@functools.cache
def repository_files() -> list[str]:
    folders = ("titanlite", "tests", "verification", "benchmarks", "configs", "docs", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    return [path.relative_to(ROOT).as_posix() for path in files if path.is_file()]


def unknown_files(text: str) -> list[str]:
    """Return the Python, TOML and shell files and the shipped configs that a page names and that do not exist.

    A page may write files of its own (`title="..."`, `--write`). Names that begin with `my` or are in capitals are the
    reader's.
    """
    written = {"config.toml", "outputs/config.toml", "outputs/node.toml"}  # by a run, and by titanlite calibrate
    written |= set(re.findall(r'title="(.+?)"', text)) | set(re.findall(r"(?:--write|>) (\S+)", text))
    files = repository_files()
    unknown = []
    for name in FILE.findall(re.sub(r"https?://\S+", "", text)):
        name = re.sub(r"^(\.\.?/)+", "", name)
        base = name.rpartition("/")[2]
        is_readers = name in written or base.startswith("my") or base.partition(".")[0].isupper()
        is_known = is_readers or name.startswith(OTHER_PROJECTS)
        if not is_known and not any(file == name or file.endswith(f"/{name}") for file in files):
            unknown.append(name)
    for name in SHIPPED.findall(text):
        is_shipped = {f"configs/{name}.toml", f"configs/reference/{name}.toml"}.intersection(files)
        if "." not in name and not name.isupper() and not is_shipped:
            unknown.append(name)
    return unknown


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_exists(path: Path):
    assert unknown_files(path.read_text()) == []


@pytest.mark.parametrize(
    "name", ["titanlite/step.py", "`sizes.py`", "configs/7b.toml", "start.sh", "titanlite train 7b"]
)
def test_an_unknown_file_is_found(name: str):
    right = "`data/loader.py`, configs/70b.toml, my_run.toml, CONFIG.toml, titanlite plan 70b, titanlite train CONFIG: "
    assert len(unknown_files(right + name + "\n")) == 1


# Form


def long_lines(text: str) -> list[str]:
    """Return the lines of prose that are too long. Code blocks, tables and the targets of links do not count."""
    lines = FENCE.sub("", text).splitlines()
    prose = [line for line in lines if not line.lstrip().startswith(("|", "<", "!["))]
    return [line for line in prose if len(re.sub(r"\]\([^)]*\)|https?://\S+", "", line)) > PROSE_COLUMNS]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path: Path):
    assert long_lines(path.read_text()) == []


def test_a_long_line_is_found():
    long = "x" * 101
    assert long_lines(f"```text\n{long}\n```\n\n| {long} |\n\n[a](https://x.org/{long})\n") == []
    assert long_lines(f"```text\nx\n```\n\n{long}\n") == [long]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_line_of_a_run_on_a_cpu_has_no_mfu(path: Path):
    """Every run that the pages show was on a CPU, which has none."""
    assert [line for line in path.read_text().splitlines() if " tok/s " in line and "MFU" in line] == []


def test_the_readme_and_the_rules_in_short_are_short():
    assert len(README.read_text().splitlines()) < README_LINES
    assert len(AGENTS.read_text().splitlines()) <= AGENTS_LINES


def unknown_paths(text: str) -> list[str]:
    """Return the modules and test files of the commands in blocks of code that do not exist."""
    commands = "\n".join(FENCE.findall(text))
    names = [name.replace(".", "/") for name in re.findall(r"python -m (\w+(?:\.\w+)+)", commands)]
    names += [name for line in re.findall(r"pytest (.*?)(?: #|$)", commands, re.MULTILINE) for name in line.split()]
    return [name for name in names if "/" in name and not any((ROOT / f"{name}{end}").exists() for end in ("", ".py"))]


def test_the_commands_of_the_rules_in_short_exist():
    assert unknown_paths(AGENTS.read_text()) == []
    assert unknown_paths("```sh\npython -m docs.build.page  # a\npytest tests/none tests/data -k x\n```\n") == [
        "docs/build/page",
        "tests/none",
    ]


def pages_by_hand(pages: dict[str, str]) -> tuple[int, int]:
    """Return the number of the pages that are written by hand, and of their lines, of pages by their path in docs/. The
    front matter, which has the tags for the site's search, is not counted, nor is what commands write of a page."""
    written = ("reference/", "testing.md", "families.md")
    by_hand = [
        WRITTEN.sub("", FRONT_MATTER.sub("", text)) for path, text in pages.items() if not path.startswith(written)
    ]
    return len(by_hand), sum(text.count("\n") for text in by_hand)


def test_the_pages_are_few_and_short():
    n_pages, n_lines = pages_by_hand({path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in DOCS})
    assert n_pages <= MOST_PAGES
    assert n_lines <= MOST_LINES
    assert f"are at most {MOST_PAGES}, with {MOST_LINES:,} lines" in (ROOT / "CONTRIBUTING.md").read_text()


def test_pages_and_lines_by_hand_are_counted():
    pages = {"data.md": "---\ntags: [a]\n---\n\na\nb\n", "tutorials/a.md": "a\n"}
    pages |= {"reference/config.md": "a\n", "testing.md": "a\n"}
    pages["plan.md"] = "a\n<!-- table: begin -->\nwritten\n<!-- table: end -->\nb\n"
    assert pages_by_hand(pages) == (3, 5)


# What commands write


@pytest.fixture(scope="module")
def written() -> types.ModuleType:
    """Return the script that writes parts of pages. It imports the tables of many tests, which takes seconds."""
    from docs.build import pages

    return pages


def test_the_reading_order_and_the_parts_are_those_of_the_code(written):
    for page, rewritten in ((README, written.readme), (ROOT / "docs" / "architecture.md", written.architecture)):
        assert page.read_text() == rewritten(page.read_text()), "run `python -m docs.build.pages`"


def test_a_wrong_reading_order_is_found(written):
    text = README.read_text()
    number = re.search(r"\| ([\d,]+) \|", text.partition("<!-- lines: begin -->")[2])[1]
    assert written.readme(text.replace(f"| {number} |", "| 7 |")) == text


@pytest.mark.parametrize("name", ["commands", "support"])
def test_a_page_that_a_command_writes_is_up_to_date(written, name):
    page = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
    assert page == getattr(written, f"{name}_page")(), "run `python -m docs.build.pages`"


def test_the_page_of_how_titanlite_is_tested_is_up_to_date():
    from docs.build import families_page, testing_page

    assert testing_page.PAGE.read_text() == testing_page.page(), "run `python -m docs.build.testing_page`"
    assert families_page.PAGE.read_text() == families_page.page(), "run `python -m docs.build.families_page`"


# The site


def build_site(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


needs_mkdocs = pytest.mark.skipif(
    not importlib.util.find_spec("mkdocs") or not importlib.util.find_spec("material"), reason="needs mkdocs-material"
)


@pytest.fixture(scope="module")
def small_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the site's settings and one page, whose site has been built, in `site`."""
    folder = tmp_path_factory.mktemp("small_site")
    docs = folder / "docs"
    docs.mkdir()
    (docs / "hooks.py").write_text((ROOT / "docs" / "hooks.py").read_text())
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:")[0]
    (folder / "mkdocs.yml").write_text(f"{settings}nav:\n  - Home: index.md\n")
    (docs / "index.md").write_text("# Home\n\nSee [the loop](../titanlite/train.py).\n")
    done = build_site(folder, folder / "site")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wrong_site(small_site: Path) -> subprocess.CompletedProcess[str]:
    """Return the build of a site with three wrong pages. Each of their warnings ends a strict build."""
    (small_site / "docs" / "index.md").write_text("# Home\n\n[a](no.md)\n\n[a](index.md#no)\n")
    (small_site / "docs" / "other.md").write_text("# Other\n")
    return build_site(small_site, small_site / "wrong")


@needs_mkdocs
def test_the_site_builds_and_needs_no_network(tmp_path: Path):
    done = build_site(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".py", ".pyc") or path.name == "build"]
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"', page.read_text())
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)"', page.read_text())
        assert [address for address in loaded if re.match(r"(?:https?:)?//", address)] == [], page


@needs_mkdocs
def test_a_link_to_a_file_outside_the_site_is_its_path(small_site: Path):
    assert "<code>titanlite/train.py</code>" in (small_site / "site" / "index.html").read_text()


@needs_mkdocs
@pytest.mark.parametrize(
    "warning",
    [
        r"link 'no\.md'.* not found",
        r"link 'index\.md#no'.* no (?:such )?anchor",
        r"not included in the \"nav\" configuration:\s*- other\.md",
    ],
    ids=["[a](no.md)", "[a](index.md#no)", "a page that the navigation lacks"],
)
def test_a_wrong_page_breaks_the_site(warning: str, wrong_site: subprocess.CompletedProcess[str]):
    assert re.search(rf"WARNING\s+-.*{warning}", wrong_site.stderr), wrong_site.stderr
    assert "Aborted with 3 warnings in strict mode" in wrong_site.stdout + wrong_site.stderr
    assert wrong_site.returncode != 0


# Hostile input


def test_the_page_has_the_numbers_of_the_tests(request: pytest.FixtureRequest):
    """The table of hostile input in docs/reliability.md counts the cases of tests."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    stated = {name: int(number) for name, number in re.findall(r"`(test_\w+)` (\d+)", page)}
    counts = Counter(item.originalname for item in request.session.items if item.originalname in stated)
    assert len(stated) > 20
    if counts.keys() != stated.keys():
        pytest.skip("not all of the tests are collected")
    assert stated == counts
