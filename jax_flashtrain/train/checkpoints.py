"""Best and last checkpoint of a run, written so that a crash at any moment leaves a whole one.

    checkpoints/step_00000500/state      orbax
    checkpoints/step_00000500/meta.json  config, data fingerprint, step, validation loss
    checkpoints/index.json               which step is last and which is best (replaced atomically)

A new folder is complete before the index names it, and old folders go after that.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from jax_flashtrain.train import processes
from jax_flashtrain.train.errors import UserError


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` in one step."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


class Checkpoints:
    """The checkpoints of one output folder."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp = ocp
        self.folder = folder.absolute()
        self.index: dict[str, Any] = {}

    def read_index(self) -> None:
        path = self.folder / "index.json"
        try:
            self.index = json.loads(path.read_text())
            for name in {self.index["last"], self.index.get("best") or self.index["last"]}:
                if not (self.folder / name).is_dir():
                    raise ValueError(f"{name} is missing")
        except FileNotFoundError:
            raise UserError(f"nothing to resume: {path} does not exist") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"cannot read {path}: {type(e).__name__}: {e}") from None

    def read_meta(self, which: str = "last") -> dict[str, Any]:
        path = self.folder / self.index[which] / "meta.json"
        try:
            meta = json.loads(path.read_text())
            for key in ("step", "config", "data"):
                meta[key]
            return meta
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"cannot read {path}: {type(e).__name__}: {e}") from None

    def save(self, state: Any, meta: dict[str, Any], *, val_loss: float | None = None) -> Path:
        """Write ``state`` as the last checkpoint; as the best too if ``val_loss`` is."""
        name = f"step_{meta['step']:08d}"
        path = self.folder / name
        best = self.index.get("best_loss")
        is_best = val_loss is not None and (best is None or val_loss < best)
        written = (path / "meta.json").exists()
        processes.barrier("looked")
        if not written:
            if processes.is_first():
                shutil.rmtree(path, ignore_errors=True)  # the rest of an interrupted save
                path.mkdir(parents=True)
            processes.barrier("made")
            with self._ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path / "state", state)
                checkpointer.wait_until_finished()
        self.index["last"] = name
        if is_best:
            self.index |= {"best": name, "best_loss": val_loss}
        if processes.is_first():
            # The last file of a checkpoint: with it, the folder is whole.
            write_json(path / "meta.json", meta | {"val_loss": val_loss})
            write_json(self.folder / "index.json", self.index)
            keep = {name, self.index.get("best")}
            for old in self.folder.glob("step_*"):
                if old.name not in keep:
                    shutil.rmtree(old)
        processes.barrier("saved")
        return path

    def restore(self, like: Any, which: str = "last") -> Any:
        """The state of a checkpoint, with the shapes, dtypes and placement of ``like``."""
        path = self.folder / self.index[which] / "state"
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        try:
            with self._ocp.StandardCheckpointer() as checkpointer:
                state = checkpointer.restore(path, target)
        except Exception as e:  # orbax raises many kinds; all mean an unreadable checkpoint here
            lines = str(e).strip().splitlines() or [""]
            raise UserError(
                f"cannot read the checkpoint {path}: {type(e).__name__}: {lines[0][:200]}"
            ) from None
        for want, got in zip(jax.tree.leaves(target), jax.tree.leaves(state), strict=True):
            if (want.shape, want.dtype) != (got.shape, got.dtype):
                raise UserError(
                    f"{path} is a checkpoint of another config: it holds {got.dtype}{got.shape} "
                    f"where {want.dtype}{want.shape} belongs"
                )
        return state
