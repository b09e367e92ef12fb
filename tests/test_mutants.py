"""Every mutant of tests/mutation still applies to the sources (run.py runs them, in minutes)."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutation"))

from mutants import MUTANTS  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_mutant_applies(mutant):
    text = (ROOT / "cpp" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.text(1) != mutant.old


def test_there_are_enough():
    assert len(MUTANTS) >= 30
    assert len({m.name for m in MUTANTS}) == len({m.text(0) for m in MUTANTS}) == len(MUTANTS)
