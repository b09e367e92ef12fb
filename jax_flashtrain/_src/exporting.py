"""What ``jax.export`` needs to know about our custom calls."""

from __future__ import annotations

from jax import export

from . import native

#: Pass as ``disabled_checks`` to ``jax.export.export``. jax refuses to serialise custom calls that
#: it does not know to be stable; these targets carry the version of their calling convention in
#: their names, so a program that was exported with one version never meets the operands of another.
export_disabled_checks: tuple[export.DisabledSafetyCheck, ...] = tuple(
    export.DisabledSafetyCheck.custom_call(target) for target in native.TARGETS
)
