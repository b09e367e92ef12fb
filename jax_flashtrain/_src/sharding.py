"""One call on several devices, with no communication but the sums that gradients need.

* Auto axes (``jit`` with shardings): the lowered call is a ``custom_partitioning`` with a Shardy
  rule. It is made in the lowering, where vmap and differentiation are over and the number of
  devices is known: a program for one device never holds it (its text has an address in it).
* Explicit axes (typed shardings): the whole differentiable op runs in a ``shard_map``.
* Manual axes (the user's ``shard_map``): nothing to do here, the op sees a shard as a whole call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import compat, primitive
from .primitive import Operands, Residual, named
from .problem import Problem, make_problem
from .sharding_plan import (
    Cuts,
    Factor,
    Plan,
    factors,
    localize,
    make_plan,
    spread,
    whole_kv_heads,
)
from .spec import DIFFERENTIABLE, RESIDUALS, AttentionSpec, Operand

#: Whose sharding decides, in this order.
_LEADERS = (Operand.Q, Operand.O, Operand.DO, Operand.K, Operand.V)

Kernel = Callable[..., Sequence[Any]]


def _order(op: Operand) -> tuple[int, int]:
    return (_LEADERS.index(op) if op in _LEADERS else len(_LEADERS), int(op))


def cuts_of(spec: Any, rank: int) -> Cuts:
    """The axes of every dimension in a PartitionSpec."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(
        () if e is None or e is P.UNCONSTRAINED else e if isinstance(e, tuple) else (e,)
        for e in entries
    )


def spec_of(cuts: Cuts) -> P:
    return P(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in cuts))


# ---- Auto axes -----------------------------------------------------------------------------------


def partitioned(run: Kernel, *operands: Any, **params: Any) -> list[Any]:
    """``run(*operands, **params)``, the lowered call, on all devices of a program."""
    present = params["present"]
    shapes = named(present, operands)
    problem = make_problem(params["spec"].layout, shapes)
    results = _result_kinds(params)

    def whole(*operands: Any) -> list[Any]:
        return list(run(*operands, **params))

    def rule(*_: Any) -> Any:
        shapes_of = primitive.forward_shapes if results == RESIDUALS else primitive.backward_shapes
        avals = shapes_of(*(compat.aval_of(x) for x in operands), **params)
        return _shardy_rule(
            problem,
            [(op, tuple(x.shape)) for op, x in shapes.items()],
            [(op, tuple(x.shape)) for op, x in zip(results, avals, strict=True)],
        )

    def partition(mesh: Any, given: Any, wanted: Any) -> Any:
        return _partition(run, params, problem, mesh, given, wanted)

    call = compat.custom_partitioning(whole)
    call.def_partition(partition=partition, sharding_rule=rule)
    out: list[Any] = call(*operands)
    return out


def _result_kinds(params: Mapping[str, Any]) -> tuple[Operand, ...]:
    """The operand whose shape each result has (that of which it is the gradient)."""
    targets = params.get("targets")
    return RESIDUALS if targets is None else tuple(t.operand for t in targets)


def _partition(
    run: Kernel,
    params: Mapping[str, Any],
    problem: Problem,
    mesh: Any,
    given: Sequence[Any],
    wanted: Sequence[Any],
) -> tuple[Any, Callable[..., Any], Any, Any]:
    """The split of one lowered call: what custom_partitioning asks for."""
    spec, present = params["spec"], params["present"]
    backward = "targets" in params
    kinds = _result_kinds(params)

    def sharded(x: Any) -> Cuts:
        named_ = isinstance(x.sharding, NamedSharding)
        return cuts_of(x.sharding.spec if named_ else (), len(x.shape))

    known = [(op, x.shape, sharded(x)) for op, x in zip(present, given, strict=True)]
    outputs = [(op, x.shape, sharded(x)) for op, x in zip(kinds, wanted, strict=True)]
    known = sorted([*known, *outputs], key=lambda entry: _order(entry[0]))
    plan = make_plan(problem, dict(mesh.shape), known)

    operand_cuts = [plan.cuts(op, x.shape) for op, x in zip(present, given, strict=True)]
    full_cuts = [plan.cuts(op, x.shape) for op, x in zip(kinds, wanted, strict=True)]
    result_cuts = full_cuts
    if backward:
        # Where a gradient is wanted whole it is summed over zeros: that one all-reduce also serves
        # the axes that are summed over anyway, and nothing is gathered.
        result_cuts = [
            tuple(a if set(a) <= set(w) else () for a, w in zip(cut, want, strict=True))
            for cut, (_, _, want) in zip(full_cuts, outputs, strict=True)
        ]

    def shard(*operands: Any) -> list[Any]:
        local = localize(plan, spec, named(present, operands))
        here, values = primitive.ordered(local)
        out = run(*values, **{**params, "present": here})
        if not backward:
            return list(out)
        return [
            _summed(plan, op, x, whole.shape, cut, keep)
            for op, x, whole, cut, keep in zip(
                kinds, out, wanted, full_cuts, result_cuts, strict=True
            )
        ]

    def shardings(cuts: Sequence[Cuts]) -> list[Any]:
        return [NamedSharding(mesh, spec_of(c)) for c in cuts]

    return mesh, shard, shardings(result_cuts), tuple(shardings(operand_cuts))


def _summed(plan: Plan, op: Operand, x: Any, shape: Sequence[int], cuts: Cuts, keep: Cuts) -> Any:
    """A gradient of one shard, summed over the axes that do not cut its result."""
    if op in (Operand.K, Operand.V):
        x = whole_kv_heads(plan, x)
    x = spread(plan, x, shape, cuts, keep)
    remaining = {axis for axes in keep for axis in axes}
    summed = tuple(axis for axis in plan.used if axis not in remaining)
    return jax.lax.psum(x, summed) if summed else x


def _shardy_rule(
    problem: Problem,
    operands: Sequence[tuple[Operand, tuple[int, ...]]],
    results: Sequence[tuple[Operand, tuple[int, ...]]],
) -> Any:
    """Tells Shardy which dimensions of operands and results (kind, shape) go together.

    Those of k, v, bias, slopes and sinks only go with their own gradients: if Shardy cut a key that
    its producer left whole, it would have to gather the key's gradient, which a shard can sum
    instead. (Cutting key heads and group together would also split mesh axes, and a PartitionSpec
    has no name for a part of an axis.)
    """
    unique = itertools.count()
    fixed: list[str] = []

    def name(op: Operand, factor: Factor) -> str:
        if factor is None or factor == "keys":
            # A name of its own in every array: not to be cut.
            fixed.append(f"fixed{next(unique)}")
            return fixed[-1]
        own = f"of{int(op)}" if op in DIFFERENTIABLE and op != Operand.Q else ""
        return f"batch{factor}{own}" if isinstance(factor, int) else f"{factor}{own}"

    def mapping(op: Operand, shape: tuple[int, ...]) -> list[str]:
        return [name(op, factor) for factor in factors(op, shape, problem.layout)]

    operand_maps = [mapping(op, shape) for op, shape in operands]
    result_maps = [mapping(op, shape) for op, shape in results]
    return compat.sharding_rule(operand_maps, result_maps, fixed)


# ---- Explicit axes -------------------------------------------------------------------------------


def has_explicit_axes(operands: Operands) -> bool:
    """Whether shardings are part of the operands' types."""
    return bool(compat.explicit_axes(compat.aval_of(x) for x in operands.values()))


def over_explicit_axes(
    attend: Callable[[Operands], Residual], spec: AttentionSpec, operands: Operands
) -> Residual:
    """``attend`` in a shard_map over the Explicit axes.

    Operands enter as they are. Where the split cuts a dimension along which an operand is
    replicated, a shard slices it; the transpose of that is the all-reduce of its gradient, while a
    reshard outside would have to gather it.
    """
    avals = {op: compat.aval_of(x) for op, x in operands.items()}
    mesh = compat.primal_mesh(avals.values())
    problem = make_problem(spec.layout, operands)
    own = {op: cuts_of(aval.sharding.spec, len(aval.shape)) for op, aval in avals.items()}
    known = sorted(
        ((op, avals[op].shape, cuts) for op, cuts in own.items()),
        key=lambda entry: _order(entry[0]),
    )
    plan = make_plan(problem, dict(mesh.shape), known)
    wanted = {op: plan.cuts(op, aval.shape) for op, aval in avals.items()}
    enters, moved = {}, dict(operands)
    for op, cuts in own.items():
        enters[op] = tuple(w if w == c else () for w, c in zip(wanted[op], cuts, strict=True))
        if enters[op] != cuts:
            # It came cut along another dimension than the call is.
            moved[op] = compat.reshard(moved[op], mesh, spec_of(enters[op]))
    present, values = primitive.ordered(moved)

    def shard(*values: Any) -> tuple[Any, ...]:
        uniform = named(present, compat.match_varying(values))
        sliced = {op: _slice_to(plan, x, enters[op], wanted[op]) for op, x in uniform.items()}
        return tuple(attend(localize(plan, spec, sliced)))

    shapes = (problem.out_shape, problem.row_shape, problem.row_shape)
    run = compat.shard_map(
        shard,
        mesh,
        tuple(spec_of(enters[op]) for op in present),
        tuple(spec_of(plan.cuts(op, shape)) for op, shape in zip(RESIDUALS, shapes, strict=True)),
        compat.explicit_axes(avals.values()),
    )
    return Residual(*compat.keep_results(run(*values)))


def _slice_to(plan: Plan, x: Any, cuts: Cuts, wanted: Cuts) -> Any:
    """The shard's part of the dimensions that are to be cut and are not."""
    for d, (have, want) in enumerate(zip(cuts, wanted, strict=True)):
        if want and not have:
            size = x.shape[d] // plan.count(want)
            x = jax.lax.dynamic_slice_in_dim(x, plan.index(want) * size, size, d)
    return x
