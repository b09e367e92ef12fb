"""The examples in the docstrings of the public functions run and print what they say."""

import doctest

import pytest

from jax_flashtrain._src import api, backends, dot_product, explain, packing


@pytest.mark.parametrize("module", [api, backends, dot_product, explain, packing])
def test_examples(module):
    # flash_attention and explain are wrapped: doctest's search by module would miss them.
    public = [x for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    tests = [t for x in public for t in doctest.DocTestFinder().find(x) if t.examples]
    assert tests
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
