"""The documentation does what it says: its commands run, its output is real, its names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpexp.builtin import GROUPS
from dpexp.device import gather_facts
from dpexp.schema import NESTED, Config

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
REFERENCE = ROOT / "docs/reference.md"
OWN = ROOT / "docs/your-own-model.md"  # five commands from a user's file to a scaling table
# Pages that a reader goes through one after the other in one folder, where some go on from others.
TOURS = (
    (README, ROOT / "docs/sweeps.md"),
    tuple(ROOT / f"docs/{name}.md" for name in ("runs", "trackers", "reference")),
    (OWN,),
)
PLAYED = tuple(page for tour in TOURS for page in tour)
PAGES = (
    *PLAYED,
    ROOT / "docs/limits.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "docs/architecture.md",
    ROOT / "docs/clusters.md",
    ROOT / "docs/launchers.md",
    ROOT / "docs/measurement.md",
    ROOT / "docs/overhead.md",
    ROOT / "docs/reliability.md",
    ROOT / "docs/scale.md",
    ROOT / "docs/validation.md",
)

# Commands of the pages that this test does not run, and why.
NOT_RUN = {
    "make demo": "makes an environment of its own and installs torch into it",
    "make test": "would run this test again",
    "python3 -m venv .venv": "makes an environment of its own and installs torch into it",
    "pip install -e '.[mlflow,wandb]'": "installs trackers; tests/extras/test_trackers.py has them",
    "python -m dpexp.board": "a server: it runs until it is stopped",
}
# Commands that are shown because they are refused or fail, with their exit status.
REFUSED = {
    'python -m dpexp device="cuda: 0"': 1,
    "python -m dpexp parallel=ddp num_devices=2 inject.die_rank=1": 1,
}
# What the pages name and a user, a run or a tool makes.
MADE_BY_USERS = {"make_data.py", "mynet.py", "scale.py", "myconf/model/mynet.yaml", "mine.py"}
MADE_BY_TOOLS = {
    *(".venv/", ".hydra/", ".submitit/", "wandb/", "scaling/", "earlier/", "dpexp/conf/"),
    *("checkpoints/", "report.md", "multirun.yaml", "optimization_results.yaml"),
}

# What a newcomer types is always run; the other pages by `make soak`.
QUICK = (README,)

# All commands of a page run in the setup of its first test.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Block:
    """A code block; `shown` is the output printed below it, "" if none is."""

    page: Path
    kind: str
    code: str
    shown: str

    @property
    def name(self) -> str:
        return self.code.strip().splitlines()[0]


def _blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    following = [*found[1:], ("", "")]
    return [
        Block(page, kind, code, after if next_kind == "text" else "")
        for (kind, code), (next_kind, after) in zip(found, following, strict=True)
        if kind != "text"
    ]


def _is_run(block: Block) -> bool:
    return not any(block.code.startswith(command) for command in NOT_RUN)


BLOCKS = [block for page in PLAYED for block in _blocks(page)]
COMMANDS = [block for block in BLOCKS if block.kind == "bash" and _is_run(block)]


Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Block], Ended]:
    """How a command ended. A page is gone through from top to bottom, as a reader types it."""
    folders = {tour: tmp_path_factory.mktemp(tour[0].stem) for tour in TOURS}
    ended: dict[Path, dict[str, Ended]] = {}

    def play(asked: Block) -> Ended:
        (tour,) = (tour for tour in TOURS if asked.page in tour)
        for page in tour[: tour.index(asked.page) + 1]:  # it goes on from those before
            if page not in ended:
                ended[page] = _play(page, folders[tour])
        return ended[asked.page][asked.code]

    return play


def _play(page: Path, folder: Path) -> dict[str, Ended]:
    """The commands of a page, and how they ended."""
    programs = Path(sys.executable).parent
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "80"}
    ended = {}
    for block in (block for block in BLOCKS if block.page == page):
        if block.kind == "python":
            name = re.match(r"# (\w+\.py)\n", block.code)
            assert name is not None, f"this block does not say what its file is called: {block}"
            (folder / name[1]).write_text(block.code, encoding="utf-8")
        elif block in COMMANDS:
            ended[block.code] = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                cwd=folder,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=600,  # wide: a machine may be busy
                check=False,
            )
    return ended


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[] if block.page in QUICK else [pytest.mark.slow])
        for block in COMMANDS
    ],
    ids=lambda block: block.name,
)
def test_a_command_of_a_page_does_what_the_page_shows(
    block: Block, played: Callable[[Block], Ended]
) -> None:
    ended = played(block)
    assert ended.returncode == REFUSED.get(block.name, 0), ended.stdout
    if gather_facts().accelerator is not None:
        return  # the pages show a machine without one
    missing = Counter(_comparable(block.shown)) - Counter(_comparable(ended.stdout))
    assert not missing, f"shown, but not printed: {list(missing)}\n{ended.stdout}"


def _comparable(output: str) -> list[str]:
    """Lines without what differs from machine to machine: figures, folders, notes on cores."""
    lines = []
    for line in output.splitlines():
        if not line.strip() or line.startswith(("note:", "…")):
            continue
        kept = line.strip()
        if "torch.Size" not in kept and '"[' not in kept:  # sizes are the same everywhere
            kept = re.sub(r"(folder:|look:|report:).*", r"\1", kept)
            # What a small model's sweep comes to, and loses its time to, is a matter of luck; so is
            # the noise.
            kept = re.sub(r".*(% efficient|differ too much for a figure).*", "the answer", kept)
            kept = re.sub(
                r"(-?\d+% of a step is lost|a step is better than ideal):.*", "lost", kept
            )
            kept = re.sub(r"a factor (of|above) \d[\d,.]* (?=\(95%)", "1 % ", kept)
            kept = kept.replace("× (too wide)", "× (1–1)")
            kept = re.sub(r"\d[\d,]*(\.\d+)?(e-?\d+)?", "N", kept)
        lines.append(re.sub(r"─+", "─", " ".join(kept.split())))
    return lines


def test_the_page_on_own_models_needs_five_commands() -> None:
    told = OWN.read_text("utf-8").split("\n# More of it\n")[0]
    walked = [block for block in COMMANDS if block.page == OWN and block.code in told]
    assert len(walked) == 5
    assert "speedup" in walked[-1].shown


def test_every_command_is_run_or_left_out_for_a_reason() -> None:
    left_out = [b for b in BLOCKS if b.kind == "bash" and not _is_run(b)]
    assert len(left_out) == len(NOT_RUN), "NOT_RUN names a command that no page has"
    assert set(REFUSED) <= {block.name for block in COMMANDS}
    assert {block.kind for block in BLOCKS} == {"bash", "python"}


def test_tab_completion_works_as_described(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    if " " in str(programs):
        pytest.skip("Hydra's script does not find a program whose path has a space")
    script = """
        eval "$(dpexp -sc install=bash)"
        COMP_LINE="dpexp dataset=tensors $1"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=2
        hydra_bash_completion
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    for typed, offered in (
        ("par", ["parallel.", "parallel="]),
        ("parallel=", ["parallel=ddp", "parallel=dp", "parallel=fsdp", "parallel=none"]),
        ("dataset.pa", ["dataset.path="]),
    ):
        ended = subprocess.run(
            ["bash", "-c", script, "bash", typed],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ended.stdout.split() == offered


def _key_table() -> dict[str, str]:
    """The keys of the reference with the default that it states."""
    section = REFERENCE.read_text("utf-8").split("\n## Keys\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| .+ \|$", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a key is there twice"
    return {key: default.strip("`") for key, default in rows}


def test_the_table_of_keys_is_that_of_the_schema() -> None:
    names = {spec.name for spec in fields(Config)} - {"extra"} - (set(NESTED) - set(GROUPS))
    names |= {f"{name}.{spec.name}" for name, node in NESTED.items() for spec in fields(node)}
    assert set(_key_table()) == names


def test_the_table_of_keys_states_the_defaults() -> None:
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/config.yaml"))
    assert isinstance(config, dict)
    options = [node for node in config["defaults"] if isinstance(node, dict)]
    chosen = {group: option for node in options for group, option in node.items()}
    options_of: dict[object, object] = {}
    for strategy in ("fsdp", "ddp"):
        loaded = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/parallel/{strategy}.yaml"))
        assert isinstance(loaded, dict)
        options_of |= loaded
    for key, stated in _key_table().items():
        if key == "parallel.strategy":
            continue  # it is the group's own
        group, _, name = key.partition(".")
        if group == "parallel" and name:
            default = options_of[name]
        elif group in GROUPS:
            default = chosen[group]
        else:
            default = config[group][name] if name else config[group]
        assert stated == str(OmegaConf.to_yaml([default]).strip().removeprefix("- ")), key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_of_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"broken links: {broken}"
    to_sections = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text)
    astray = [
        f"{name}#{section}"
        for name, section in to_sections
        if section not in _sections(page.parent / name if name else page)
    ]
    assert not astray, f"links to sections that are not there: {astray}"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|yaml|toml|txt|png)|/))`", prose)
    homes = (ROOT, ROOT / "dpexp", ROOT / "tests")
    lost = {
        name
        for name in set(named) - MADE_BY_USERS - MADE_BY_TOOLS
        if not name.startswith("outputs/") and not any((home / name).exists() for home in homes)
    }
    assert not lost, f"no such file: {lost}"


def _sections(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links to them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_exist_and_no_machine_shows_through(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = re.findall(r"(?:^|`)make (\w+)(?:$|`)", text, re.MULTILINE)
    assert set(named) <= set(targets)
    assert not re.findall(r"/(?:tmp|root|home|work|Users)/", text)
