"""The example of structured output fills in its forms, and computes what they share once."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "structured_output.py"


def test_the_example_fills_in_three_forms_under_one_prompt(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("Ticket(topic=") == 3
    counts = re.findall(r"(\d+) prompt tokens cached, (\d+) computed", said)
    assert int(counts[0][0]) == 0
    for cached, computed in counts[1:]:
        assert int(cached) > 100 > 3 * int(computed) / 2
    assert re.search(r"One of two words: (yes|no)\n", said)
