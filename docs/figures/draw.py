"""Draws the figures of docs/how-it-works.md: ``python docs/figures/draw.py``.

Which tile is visited comes from the library's own visibility rules, names of operands and results
from its interface; tests/test_docs.py fails when a figure is older than either.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import textwrap

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import svg
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path

from jax_flashtrain._src.blockwise_tiles import geometry
from jax_flashtrain._src.blockwise_visibility import Visibility
from jax_flashtrain._src.canonical import Arguments, canonicalize
from jax_flashtrain._src.spec import DIFFERENTIABLE, RESIDUALS, Operand

HERE = pathlib.Path(__file__).resolve().parent
BLOCK = 4
HIDDEN, MIXED, VISIBLE = 0, 1, 2
COLORS = {HIDDEN: "#ffffff", MIXED: "#f5b971", VISIBLE: "#5b8db8"}
MEANING = {
    VISIBLE: "visited, everything visible: no test per element",
    MIXED: "visited, tested per element",
    HIDDEN: "neither loaded nor computed",
}
INK, PAPER = "#333333", "#f2f4f7"

#: Title, number of queries and of keys, options of the call.
CALLS = (
    ("causal=True", 24, 24, {"causal": True}),
    ("causal=True, 12 queries, 24 keys", 12, 24, {"causal": True}),
    ("window=(7, 0)", 24, 24, {"window": (7, 0)}),
    (
        "causal=True, segment_ids",
        24,
        24,
        {"causal": True, "segment_ids": np.repeat([0, 1, 2], [9, 8, 7])},
    ),
    ("kv_lengths=18, q_lengths=18", 24, 24, {"kv_lengths": 18, "q_lengths": 18}),
    (
        "window=(7, 0), mask",
        24,
        24,
        {"window": (7, 0), "mask": (np.arange(24) % 24 < 10) | (np.arange(24) >= 17)},
    ),
)


def pairs_and_tiles(Sq: int, Sk: int, options: dict) -> tuple[np.ndarray, np.ndarray]:
    """(visible [Sq, Sk], state of every tile of BLOCK x BLOCK)."""
    q, k = np.zeros((Sq, 1, 1), np.float32), np.zeros((Sk, 1, 1), np.float32)
    canonical = canonicalize(q, k, k, Arguments(**options))
    spec, operands = canonical.call.spec, canonical.operands
    geo = dataclasses.replace(geometry(spec, operands), block_q=BLOCK, block_k=BLOCK)
    rules = Visibility(spec, geo, operands)
    visible = np.zeros((Sq, Sk), bool)
    for i in range(0, Sq, BLOCK):
        for j in range(0, Sk, BLOCK):
            i0, j0 = jnp.int32(i), jnp.int32(j)
            near = rules.near(i0, j0)
            if near is None or bool(near):
                tile = rules.tile(i0, j0, rules.listed(i0, j0))
                visible[i : i + BLOCK, j : j + BLOCK] = True if tile is None else np.squeeze(tile)
    blocks = visible.reshape(Sq // BLOCK, BLOCK, Sk // BLOCK, BLOCK).swapaxes(1, 2)
    some, every = blocks.any((2, 3)), blocks.all((2, 3))
    return visible, np.where(every, VISIBLE, np.where(some, MIXED, HIDDEN))


@functools.cache
def all_tiles() -> list[tuple[np.ndarray, np.ndarray]]:
    return [pairs_and_tiles(Sq, Sk, options) for _, Sq, Sk, options in CALLS]


def flow() -> dict[str, list[str]]:
    """What goes in and comes out of the two kernels, by the names of the interface."""
    lower = lambda ops: [op.name.lower() for op in ops]  # noqa: E731
    first_of_backward = min(*RESIDUALS, Operand.DO, Operand.DLSE)
    return {
        "operands": lower(op for op in Operand if op < first_of_backward),
        "residual": lower(RESIDUALS),
        "cotangents": lower((Operand.DO, Operand.DLSE)),
        "gradients": [f"d{name}" for name in lower(DIFFERENTIABLE)],
    }


def source() -> str:
    """Digest of everything that the figures show."""
    tiles = [(visible.tolist(), state.tolist()) for visible, state in all_tiles()]
    return svg.digest(pathlib.Path(__file__), tiles, flow())


def _grid(axis, visible: np.ndarray, state: np.ndarray) -> None:
    Sq, Sk = visible.shape
    for (a, b), kind in np.ndenumerate(state):
        corner = (b * BLOCK, a * BLOCK)
        axis.add_patch(Rectangle(corner, BLOCK, BLOCK, fc=COLORS[int(kind)], ec=INK, lw=0.8))
    square = np.array([(0, 0), (0.16, 0), (0.16, 0.16), (0, 0.16), (0, 0)])
    corners = np.argwhere(visible)[:, ::-1] + 0.42
    dots = Path.make_compound_path(*(Path(square + c, closed=True) for c in corners))
    axis.add_patch(PathPatch(dots, fc=INK, lw=0))
    axis.set(xlim=(-0.2, Sk + 0.2), ylim=(Sq + 0.2, -0.2), aspect="equal", xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set_visible(False)


def draw_tiles(path: pathlib.Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 7.2), layout="constrained")
    for axis, (title, *_), (visible, state) in zip(axes.flat, CALLS, all_tiles(), strict=True):
        _grid(axis, visible, state)
        visited = np.count_nonzero(state != HIDDEN)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(f"keys: {visited} of {state.size} tiles visited", fontsize=9)
    axes[0, 0].set_ylabel("queries", fontsize=9)
    axes[1, 0].set_ylabel("queries", fontsize=9)
    handles = [Patch(fc=COLORS[kind], ec=INK, label=text) for kind, text in MEANING.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    svg.save(figure, path, source())


def draw_walks(path: pathlib.Path) -> None:
    """Who keeps what: the causal call of the first panel."""
    visible, state = all_tiles()[0]
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
    for axis in axes:
        _grid(axis, visible, state)
    row, column = 4, 1
    keys = np.flatnonzero(state[row] != HIDDEN)
    queries = np.flatnonzero(state[:, column] != HIDDEN)
    arrow = {"arrowstyle": "-|>", "lw": 2.2, "color": "#b03a2e", "shrinkA": 0, "shrinkB": 0}
    for axis, start, end in (
        (axes[0], (keys[0], row), (keys[-1], row)),
        (axes[1], (column, queries[0]), (column, queries[-1])),
    ):
        middle = [[(n + 0.5) * BLOCK for n in tile] for tile in (end, start)]
        axis.annotate("", *middle, arrowprops=arrow)
    axes[0].set_title("forward: a query tile stays, key tiles pass", fontsize=10)
    axes[0].set_xlabel("kept per row: maximum, sum and o", fontsize=9)
    axes[1].set_title("backward: a key tile stays, query tiles pass", fontsize=10)
    axes[1].set_xlabel("kept per key: dk, dv, summed over the heads of a group", fontsize=9)
    for axis in axes:
        axis.set_ylabel("queries", fontsize=9)
    svg.save(figure, path, source())


def _box(axis, x: float, y: float, width: float, lines: list[str], title: str, color: str) -> None:
    height = 0.34 * len(lines) + 0.6
    axis.add_patch(
        FancyBboxPatch((x, y - height), width, height, boxstyle="round,pad=0.06", fc=color, ec=INK)
    )
    axis.text(x + 0.1, y - 0.12, title, va="top", fontsize=10, weight="bold", color=INK)
    for n, line in enumerate(lines):
        axis.text(x + 0.1, y - 0.55 - 0.34 * n, line, va="top", fontsize=8.5, family="monospace")


def draw_flow(path: pathlib.Path) -> None:
    names = flow()
    figure, axis = plt.subplots(figsize=(9.6, 5.6), layout="constrained")
    axis.set(xlim=(-0.2, 14.2), ylim=(-7.7, 0.4), xticks=[], yticks=[])
    axis.set_axis_off()
    blue, orange = "#dbe7f3", "#fde9d0"
    operands = textwrap.wrap(", ".join(names["operands"]), 28)
    gradients = textwrap.wrap(", ".join(names["gradients"]), 24)
    _box(axis, 0.0, 0.0, 3.6, operands, "operands", PAPER)
    _box(axis, 5.0, 0.0, 4.6, [
        "for each key tile that a row sees:",
        "  s = cap(scale q k^T) + bias - alibi",
        "  m, l, o = running softmax",
        "o / l",
        "row_max = m, row_log_sum = ln l",
    ], "forward kernel", blue)  # fmt: skip
    _box(axis, 11.0, 0.0, 3.0, [*names["residual"], "", "L = row_max", "    + row_log_sum"],
        "results and residual", PAPER)  # fmt: skip
    _box(axis, 5.0, -4.2, 4.6, [
        "delta = sum(o do) - dlse",
        "for each tile that is visible:",
        "  s again, p = exp(s - L)",
        "  dv += p^T do,  dp = do v^T",
        "  ds = p (dp - delta)",
        "  dq += ds k,  dk += ds^T q",
    ], "backward kernels", orange)  # fmt: skip
    _box(axis, 11.0, -5.2, 3.0, names["cotangents"], "cotangents", PAPER)
    _box(axis, 0.0, -5.4, 3.6, gradients, "gradients", PAPER)
    arrows = [
        ((3.7, -1.2), (4.9, -1.2)),  # operands -> forward
        ((9.7, -1.2), (10.9, -1.2)),  # forward -> results
        ((3.4, -3.1), (4.9, -4.6)),  # operands -> backward
        ((11.2, -2.9), (9.7, -4.6)),  # residual -> backward
        ((10.9, -5.8), (9.7, -5.8)),  # cotangents -> backward
        ((4.9, -6.0), (3.7, -6.0)),  # backward -> gradients
    ]
    for start, end in arrows:
        axis.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=INK, lw=1.4)
        )
    svg.save(figure, path, source())


FIGURES = {"tiles.svg": draw_tiles, "walks.svg": draw_walks, "flow.svg": draw_flow}


def main() -> None:
    for name, draw in FIGURES.items():
        draw(HERE / name)
        print(HERE / name)


if __name__ == "__main__":
    main()
