"""Random combinations of every option: o, L and each gradient against the float64 oracle.

The draws are a pure function of their seed (drawing.py), so a failure repeats. It is made smaller
before it is reported; what it becomes is added to ``NAMED``, which runs first. The native kernels
get a new program for every draw; the blockwise code, whose programs take a second to compile, three
sets of values for each of its programs.
"""

import jax
import numpy as np
import pytest
from checking import run, value_and_grads, verify
from drawing import OPTIONS, Coverage, Recipe, build, draw_recipe, revalue, shrink
from tolerances import Mismatch

NATIVE_DRAWS, JAX_PROGRAMS, JAX_VALUES = 260, 24, 3
CHUNK = 20
SLOW_NATIVE, SLOW_JAX_PROGRAMS = 4100, 300

#: Shrunk failures of the past, by what was wrong.
NAMED: dict[str, Recipe] = {
    # Three false alarms: the rule took the luck of one plain sum for its typical error.
    "one sink, bfloat16": Recipe(
        seed=91,
        on=frozenset({"sinks", "small_dtype", "kv_lengths", "segment_ids", "scale"}),
        B=(1,), Sq=30, Sk=30, Hkv=1, G=1, D=1, Dv=1,
    ),
    "slopes of three heads, bfloat16": Recipe(
        seed=117,
        on=frozenset({"unequal_lengths", "small_dtype", "q_lengths", "alibi_slopes", "dropout",
                      "q_offset", "unequal_head_sizes", "grouped"}),
        B=(2,), Sq=39, Sk=61, Hkv=1, G=3, D=32, Dv=19,
    ),
    "sinks of two heads, float16": Recipe(
        seed=10011,
        on=frozenset({"unequal_lengths", "heads_first", "small_dtype", "sinks", "dropout"}),
        B=(2,), Sq=33, Sk=177, Hkv=2, G=1, D=32, Dv=32,
    ),
}  # fmt: skip

#: The blockwise programs are long; what LLVM makes of them is not what is tested here.
QUICK_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def _answers(recipe, implementation, values=1):
    """(call, results) of the recipe's arrays, then of further values in the same program."""
    call = build(recipe)
    if implementation == "native":
        yield call, run(call, implementation)
        return
    g, args = value_and_grads(call, implementation)
    compiled = (
        jax.jit(g).lower(*args).compile(QUICK_COMPILE if jax.default_backend() == "cpu" else {})
    )
    if "poison" in recipe.on:
        values = 1  # which places are hidden changes with the values
    for n in range(values):
        if n:
            call = revalue(call, n)
        out = compiled(*value_and_grads(call, implementation)[1])
        yield call, {name: np.asarray(x) for name, x in out.items()}


def _failure(recipe, implementation, values=1) -> str:
    """What is wrong with a recipe, '' if nothing."""
    for call, got in _answers(recipe, implementation, values):
        try:
            verify(call, got)
        except Mismatch as mismatch:
            return str(mismatch)
    return ""


def _hold(seeds, implementation, values=1):
    for seed in seeds:
        recipe = draw_recipe(seed)
        if _failure(recipe, implementation, values):
            attempts = 60 if implementation == "native" else 12  # a blockwise program takes seconds
            small = shrink(recipe, lambda r: bool(_failure(r, implementation)), attempts=attempts)
            text = _failure(small, implementation) or _failure(recipe, implementation, values)
            pytest.fail(f"seed {seed}, {implementation}: {text}\n{small}")


def _chunks(count, start=0, size=CHUNK):
    return [
        pytest.param(range(n, min(n + size, start + count)), id=f"from {n}")
        for n in range(start, start + count, size)
    ]


def test_named_cases(implementation):
    wrong = {name: _failure(recipe, implementation) for name, recipe in NAMED.items()}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("seeds", _chunks(NATIVE_DRAWS))
def test_native(seeds):
    _hold(seeds, "native")


@pytest.mark.parametrize("seeds", _chunks(JAX_PROGRAMS, start=10_000, size=4))
def test_blockwise(seeds):
    _hold(seeds, "jax", JAX_VALUES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", _chunks(SLOW_NATIVE, start=20_000))
def test_native_long(seeds):
    _hold(seeds, "native")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", _chunks(SLOW_JAX_PROGRAMS, start=40_000))
def test_blockwise_long(seeds):
    _hold(seeds, "jax", JAX_VALUES)


def test_coverage(capsys):
    """Each option in at least a quarter of the draws, every pair together, half of them native."""
    coverage, native, values = Coverage(), 0, 0
    for seed in range(NATIVE_DRAWS):
        coverage.add(draw_recipe(seed))
        native += 1
    for seed in range(10_000, 10_000 + JAX_PROGRAMS):
        recipe = draw_recipe(seed)
        coverage.add(recipe)
        values += 1 if "poison" in recipe.on else JAX_VALUES
    with capsys.disabled():
        print(f"\n{coverage}; {native} native draws, {values} blockwise ones")
    coverage.check()
    assert native + values >= 300
    assert native >= values
    assert SLOW_NATIVE + SLOW_JAX_PROGRAMS * JAX_VALUES >= 5000


def test_draws_repeat_and_options_are_independent():
    """The same seed gives the same call, and dropping an option moves no other option's values."""
    for seed in range(30):
        recipe = draw_recipe(seed)
        a, b = build(recipe), build(draw_recipe(seed))
        assert a.describe() == b.describe()
        if "bias" in recipe.on and "mask" in recipe.on and "poison" not in recipe.on:
            less = build(recipe.without("mask"))
            np.testing.assert_array_equal(less.arrays["bias"], a.arrays["bias"])
    assert set().union(*(draw_recipe(s).on for s in range(30))) == set(OPTIONS)


def test_a_wrong_result_is_found_and_shrunk():
    """A recipe that "fails" whenever causal meets a window ends as little more than that."""
    recipe = next(r for r in map(draw_recipe, range(1000)) if {"causal", "window", "bias"} <= r.on)
    small = shrink(recipe, lambda r: {"causal", "window"} <= r.on and r.Sq >= 3)
    assert small.on == {"causal", "window"}
    assert small.Sq == 3
    call = build(small)
    got = run(call, "native")
    verify(call, got)
    for name in got:
        wrong = dict(got)
        wrong[name] = (wrong[name].astype(np.float32) * 1.1 + 0.01).astype(got[name].dtype)
        with pytest.raises(Mismatch):
            verify(call, wrong)
