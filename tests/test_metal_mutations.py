"""Seeded bugs in the Metal kernels: the probes pass on the kernels and catch every mutant."""

from __future__ import annotations

import pytest
from metal import mutants, probes
from metal.emulated import module


@pytest.fixture(scope="module")
def hunters():
    module()  # skips where there is no emulated build
    return probes.make()


@pytest.fixture
def kernels():
    """A function that installs kernel sources; the originals come back afterwards."""
    original = mutants.sources(None)
    device = module().emulator

    def install(sources):
        for name, text in sources.items():
            if text != original[name] or sources is original:
                device.set_source(name, text)

    yield install
    install(original)


def caught_by(hunters) -> str:
    """What the first probe that fails says; "" when all pass."""
    for probe in hunters:
        try:
            probe.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_the_kernels_pass_every_probe(hunters):
    assert caught_by(hunters) == ""


def test_there_is_a_mutant_per_kernel():
    files = {m.file.rsplit("/", 1)[1] for m in mutants.MUTANTS}
    assert files >= {f"{k}.metal" for k in mutants.KERNELS}
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 25


QUICK = mutants.MUTANTS[::9]


@pytest.mark.parametrize("mutant", QUICK, ids=[m.name for m in QUICK])
def test_mutant_is_caught(mutant, hunters, kernels):
    kernels(mutants.sources(mutant))
    message = caught_by(hunters)
    assert message, f"no probe caught: {mutant.name}"
    assert "the Metal compiler refused" not in message, message


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=[m.name for m in mutants.MUTANTS])
def test_every_mutant_is_caught(mutant, hunters, kernels):
    test_mutant_is_caught(mutant, hunters, kernels)
