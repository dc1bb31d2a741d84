"""docs/clusters.md: its commands need more than a folder, so tests of several modules run them."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/clusters.md"
PLAYED_BY = {
    "Checkpoints": "test_checkpoint_commands.py",
    "When a rank is lost": "test_checkpoint_commands.py",
    "Two hosts and more, by torchrun": "cluster/test_two_hosts.py",
    "Slurm": "cluster/test_slurm.py",
    "Ray": "extras/test_launcher_plugins.py",
    "Several sweeps on one machine": "test_seats.py",
}


def test_each_section_with_commands_has_tests_that_read_them_from_the_page() -> None:
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    with_commands = [each.splitlines()[0] for each in sections if "```bash\n" in each]
    assert with_commands == list(PLAYED_BY)
    for section, name in PLAYED_BY.items():
        text = (TESTS / name).read_text("utf-8")
        assert "docs/clusters.md" in text or "shown(SECTION" in text, section
        assert section in text, section
