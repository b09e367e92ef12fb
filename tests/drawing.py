"""Random attention calls that combine every option, for the property tests (CPU and GPU).

``draw_recipe(seed)`` is a pure function of the seed. Sizes, options and values are drawn apart, so
that a failing call can be made smaller: ``shrink`` drops options and halves sizes while it fails.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import cases
import jax
import jax.numpy as jnp
import numpy as np
from checking import DTYPES, Call, draw, make_call, references

#: Every yes-or-no choice of a draw. Each is on with probability 0.4.
OPTIONS = (
    "bias", "mask", "causal", "window", "q_offset", "q_lengths", "kv_lengths", "segment_ids",
    "alibi_slopes", "sinks", "scale", "softcap", "dropout", "grouped", "unequal_head_sizes",
    "unequal_lengths", "heads_first", "several_batch_dims", "dlse", "small_dtype", "several_tiles",
    "poison", "array_window", "forward_mode_rules", "deterministic", "precision",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a draw decided, before any array exists."""

    seed: int
    on: frozenset[str]
    B: tuple[int, ...]
    Sq: int
    Sk: int
    Hkv: int
    G: int
    D: int
    Dv: int

    def without(self, option: str) -> Recipe:
        """The same recipe with one option less."""
        changes = {"grouped": {"G": 1}, "unequal_head_sizes": {"Dv": self.D},
                   "unequal_lengths": {"Sk": self.Sq},
                   "several_batch_dims": {"B": (2,)}}  # fmt: skip
        return dataclasses.replace(self, on=self.on - {option}, **changes.get(option, {}))


def draw_recipe(seed: int, *, largest: int | None = None) -> Recipe:
    """Sizes and options of one random call. ``largest``: the longest sequence (else by option)."""
    rng = np.random.default_rng((seed, 1))
    on = frozenset(name for name in OPTIONS if rng.random() < 0.4)

    def length():
        if largest is not None:
            return int(rng.integers(1, largest + 1))
        return int(rng.integers(65, 200) if "several_tiles" in on else rng.integers(1, 65))

    Sq = length()
    D = int(rng.choice([1, 3, 8, 16, 17, 24, 32, 40, 64, 72]))
    return Recipe(
        seed=seed,
        on=on,
        B=((), (2, 2), (1, 3), (2, 1, 2))[rng.integers(4)] if "several_batch_dims" in on else (2,),
        Sq=Sq,
        Sk=length() if "unequal_lengths" in on else Sq,
        Hkv=int(rng.integers(1, 3)),
        G=int(rng.integers(2, 5)) if "grouped" in on else 1,
        D=D,
        Dv=int(rng.choice([1, 5, 8, 20, 33, 64])) if "unequal_head_sizes" in on else D,
    )


def build(recipe: Recipe) -> Call:
    """The arrays of a recipe. Each option has a stream of its own: dropping one moves no other."""
    r, on = recipe, recipe.on
    batch, Hq = r.B, r.Hkv * r.G
    full = (*batch, Hq, r.Sq, r.Sk)
    streams = {name: np.random.default_rng((r.seed, 2, n)) for n, name in enumerate(OPTIONS)}

    def pattern(rng):
        keep = cases.BROADCAST_PATTERNS[rng.integers(16)]
        lead = (keep[0],) * len(batch) if rng.random() < 0.7 else rng.random(len(batch)) < 0.5
        shape = cases.broadcast_shape((*lead, *keep[1:]), full)
        while rng.random() < 0.3 and len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]  # leading dimensions may be left out
        return shape

    options, rng = {}, streams["small_dtype"]
    dtype = np.dtype(np.float32)
    if "small_dtype" in on:
        dtype = DTYPES[str(rng.choice(["bfloat16", "float16"]))]
    if "bias" in on:
        rng = streams["bias"]
        shape = pattern(rng)
        bias = rng.standard_normal(shape) * 2
        bias[rng.random(shape) < 0.05] = -np.inf
        options["bias"] = bias.astype(DTYPES[str(rng.choice(["float32", "bfloat16", "float16"]))])
    if "mask" in on:
        rng = streams["mask"]
        options["mask"] = rng.random(pattern(rng)) < rng.choice([0.3, 0.7, 0.95])
    if "causal" in on:
        options["causal"] = True
    if "window" in on:
        rng = streams["window"]
        sides = [
            int(rng.integers(0, 1 + max(r.Sq, r.Sk))) if rng.random() < 0.7 else None for _ in "lr"
        ]
        if "array_window" in on:  # operands instead of attributes
            sides = [None if side is None else jnp.asarray(side, jnp.int32) for side in sides]
        options["window"] = tuple(sides)
    if "q_offset" in on:
        rng = streams["q_offset"]
        shape = batch if rng.random() < 0.5 else ()
        options["q_offset"] = rng.integers(-r.Sq // 2, r.Sk + 3, shape).astype(np.int32)
    for name, size in (("q_lengths", r.Sq), ("kv_lengths", r.Sk)):
        if name in on:
            options[name] = streams[name].integers(-1, size + 3, batch).astype(np.int32)
    if "segment_ids" in on:
        rng = streams["segment_ids"]
        ids = [rng.integers(0, 3, (*batch, n)).astype(np.int32) for n in (r.Sq, r.Sk)]
        if rng.random() < 0.7:
            ids = [np.sort(x, -1) for x in ids]  # packed documents; the others are unsorted
        single = "unequal_lengths" not in on and rng.random() < 0.5
        options["segment_ids"] = ids[0] if single else tuple(ids)
    if "alibi_slopes" in on:
        rng = streams["alibi_slopes"]
        shape = (*batch, Hq) if rng.random() < 0.4 else (Hq,)
        options["alibi_slopes"] = rng.uniform(-0.02, 0.1, shape).astype(np.float32)
    if "sinks" in on:
        rng = streams["sinks"]
        options["sinks"] = draw(rng, (Hq,), np.float32, 2.0)
        if rng.random() < 0.1:
            options["sinks"][0] = -np.inf
    if "scale" in on:
        options["scale"] = float(streams["scale"].uniform(-0.1, 0.6))
    if "softcap" in on:
        options["softcap"] = float(streams["softcap"].choice([1.0, 5.0, 30.0]))
    if "dropout" in on:
        rng = streams["dropout"]
        options["dropout_rate"] = float(rng.uniform(0.05, 0.8))
        options["dropout_key"] = jax.random.key(int(rng.integers(2**31)))
    if "forward_mode_rules" in on:
        options["autodiff"] = "jvp"
    if "deterministic" in on:
        options["deterministic"] = True
    if "precision" in on:
        options["precision"] = "highest"
    call = make_call(
        r.seed, B=batch, Sq=r.Sq, Sk=r.Sk, Hq=Hq, Hkv=r.Hkv, D=r.D, Dv=r.Dv, dtype=dtype,
        layout="BNTH" if "heads_first" in on else "BTNH", dlse="dlse" in on, **options,
    )  # fmt: skip
    return poisoned(call) if "poison" in on else call


def poisoned(call: Call, junk: float = np.nan) -> Call:
    """The call with ``junk`` wherever it must not matter: hidden keys and biases, empty rows."""
    attention = references(call)[1]
    given = attention._as_given
    hidden_key = ~attention._grouped(attention.see).any((-3, -2))
    empty_row = ~attention.see.any(-1)
    arrays, do = dict(call.arrays), call.do.copy()
    dlse = None if call.dlse is None else call.dlse.copy()
    for name, rows in (("q", empty_row), ("k", hidden_key), ("v", hidden_key)):
        arrays[name] = arrays[name].copy()
        arrays[name][given(rows[..., None])[..., 0]] = junk
    do[given(empty_row[..., None])[..., 0]] = junk
    if dlse is not None and "sinks" not in arrays:  # a sink receives dL of an empty row
        dlse[empty_row] = junk
    if "bias" in arrays:
        seen = attention._sum_to_bias(attention.see.astype(float)) > 0
        arrays["bias"] = np.where(seen, arrays["bias"], arrays["bias"].dtype.type(junk))
    return Call(arrays, call.static, do, dlse)


def revalue(call: Call, seed: int) -> Call:
    """New values in the same program: shapes, dtypes and static options stay."""
    rng = np.random.default_rng((seed, 3))

    def new(name, x):
        if isinstance(x, tuple):
            return tuple(new(name, y) for y in x)
        if name == "dropout_key":
            return jax.random.key(int(rng.integers(2**31)))
        flat = rng.permutation(np.ravel(x))  # the same kind of values, elsewhere
        return flat.reshape(np.shape(x)).astype(x.dtype)

    arrays = {name: new(name, x) for name, x in call.arrays.items()}
    dlse = None if call.dlse is None else new("dlse", call.dlse)
    return Call(arrays, call.static, new("do", call.do), dlse)


def shrink(recipe: Recipe, fails: Callable[[Recipe], bool], *, attempts: int = 60) -> Recipe:
    """A smaller recipe that still fails: fewer options first, then smaller sizes."""

    def candidates(r):
        yield from (r.without(name) for name in sorted(r.on))
        if len(r.B) != 1 or r.B != (1,):
            yield dataclasses.replace(r, B=(1,), on=r.on - {"several_batch_dims"})
        for name in ("Sq", "Sk", "D", "Dv", "Hkv"):
            size = getattr(r, name)
            for smaller in {1, size // 2, size - 1} - {0, size}:
                changed = dataclasses.replace(r, **{name: smaller})
                if "unequal_lengths" not in r.on:
                    changed = (
                        dataclasses.replace(changed, Sq=smaller, Sk=smaller)
                        if name[0] == "S"
                        else changed
                    )
                if "unequal_head_sizes" not in r.on and name in ("D", "Dv"):
                    changed = dataclasses.replace(changed, D=smaller, Dv=smaller)
                yield changed

    progress = True
    while progress and attempts > 0:
        progress = False
        for smaller in candidates(recipe):
            attempts -= 1
            if attempts <= 0:
                break
            if fails(smaller):
                recipe, progress = smaller, True
                break
    return recipe


class Coverage:
    """How often each option, and each pair of options, was on."""

    def __init__(self):
        self.total, self.single, self.pairs = 0, Counter(), Counter()

    def add(self, recipe: Recipe) -> None:
        self.total += 1
        self.single.update(recipe.on)
        self.pairs.update(itertools.combinations(sorted(recipe.on), 2))

    def check(self, share: float = 0.25) -> None:
        """Each option in at least ``share`` of the draws, and every pair somewhere."""
        rare = {n: self.single[n] for n in OPTIONS if self.single[n] < share * self.total}
        assert not rare, f"of {self.total} draws: {rare}"
        missing = [p for p in itertools.combinations(sorted(OPTIONS), 2) if not self.pairs[p]]
        assert not missing, missing

    def __str__(self) -> str:
        rows = [f"{name} {100 * self.single[name] / self.total:.0f} %" for name in OPTIONS]
        rarest = min(self.pairs[p] for p in itertools.combinations(sorted(OPTIONS), 2))
        return f"{self.total} draws: {', '.join(rows)}; rarest pair {rarest} times"
