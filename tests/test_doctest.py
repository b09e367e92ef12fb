"""The examples in docstrings run and print what they say, wherever they are."""

import doctest
import importlib
import inspect
import pathlib

import pytest

import jax_flashtrain

PACKAGE = pathlib.Path(jax_flashtrain.__file__).parent


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = [
    module_name(path)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    module = importlib.import_module(name)
    # doctest's search by module misses functions with a decorator (flash_attention, explain).
    public = [x for x in vars(module).values() if getattr(x, "__module__", "") == name]
    finder = doctest.DocTestFinder()
    tests = [t for x in (*public, module) for t in finder.find(x) if t.examples]
    assert tests
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in {t.name: t for t in tests}.values():
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", jax_flashtrain.__all__)
def test_public_functions_have_an_example(name):
    function = getattr(jax_flashtrain, name)
    if callable(function):
        assert ">>> " in inspect.getdoc(function)
