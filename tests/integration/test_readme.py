"""The README says what is true: its snippet runs, and the files it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_snippet_runs_and_reuses(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip()]) < 20
    exec(compile(snippet, "README.md", "exec"), {})
    assert "6.3 times fewer tokens" in capsys.readouterr().out


def test_named_files_exist() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\b(?:scripts|configs|recipes)/[\w./]+\w", README):
        assert (ROOT / name).exists(), name
