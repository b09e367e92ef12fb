"""The Python and C++ halves state the same calling convention; the import guard speaks up."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax import export

import jax_flashtrain
from jax_flashtrain import flash_attention
from jax_flashtrain._src import backends, native, spec
from jax_flashtrain._src.primitive import Target
from jax_flashtrain._src.problem import trailing_dims
from jax_flashtrain._src.spec import AttentionSpec, Operand

CORE = pathlib.Path(__file__).resolve().parent.parent / "cpp" / "core"


def cpp(name: str) -> str:
    text = (CORE / name).read_text(encoding="utf-8")
    return re.sub(r"//[^\n]*", "", text)


def enumerators(text: str, name: str) -> dict[str, int]:
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}}", text, re.S)
    assert body, name
    found: dict[str, int] = {}
    following = 0
    for entry in filter(None, (e.strip() for e in body.group(1).split(","))):
        key, _, value = (part.strip() for part in entry.partition("="))
        following = int(value) if value else following
        found[key] = following
        following += 1
    return found


def camel(name: str) -> str:
    """Q_OFFSET -> kQOffset, DO -> kDO."""
    special = {"DO": "kDO", "DLSE": "kDLse", "BTNH": "kBTNH", "BNTH": "kBNTH"}
    return special.get(name) or "k" + "".join(part.capitalize() for part in name.split("_"))


def test_versions_and_constants():
    attrs = cpp("attrs.h")
    assert int(re.search(r"kInterfaceVersion = (\d+)", attrs).group(1)) == spec.INTERFACE_VERSION
    assert float(re.search(r"kEmptyRow = ([\d.e+]+)", attrs).group(1)) == spec.EMPTY_ROW
    limit = int(re.search(r"kMaxBatchDims = (\d+)", cpp("problem.h")).group(1))
    assert limit == spec.MAX_BATCH_DIMS


@pytest.mark.parametrize(
    ("member", "name", "prefix"),
    [
        (spec.Operand, "Operand", ""),
        (spec.Layout, "Layout", ""),
        (spec.Precision, "Precision", ""),
        (spec.Grad, "Grad", "kGrad"),
    ],
)
def test_enums_are_twins(member, name, prefix):
    theirs = enumerators(cpp("attrs.h"), name)
    theirs.pop("kNumOperands", None)
    ours = {
        (prefix + m.name.capitalize() if prefix else camel(m.name)): int(m.value) for m in member
    }
    assert ours == theirs


def test_attributes_are_the_fields_of_attrs():
    body = re.search(r"struct Attrs {(.*?)};", cpp("attrs.h"), re.S).group(1)
    kinds = {"int64_t": np.int64, "double": np.float64}
    fields = {name: kinds[kind] for kind, name in re.findall(r"(int64_t|double) (\w+) =", body)}
    ours = AttentionSpec(scale=1.0).attributes(present=7, batch_dims=1)
    assert {name: type(value) for name, value in ours.items()} == fields


def test_dtype_codes():
    theirs = enumerators(cpp("problem.h"), "DType")
    names = {"float16": "kF16", "bfloat16": "kBF16", "float32": "kF32", "float64": "kF64"}
    wanted = {ours: theirs[name] for ours, name in names.items()}
    assert dict(backends.DTYPE_CODES) == wanted


def test_attribute_values_travel():
    chosen = AttentionSpec(
        scale=0.5,
        softcap=3.0,
        causal=True,
        window=(4, None),
        dropout_rate=0.25,
        deterministic=True,
        precision=spec.Precision.HIGHEST,
        layout=spec.Layout.BNTH,
    ).attributes(present=2055, batch_dims=2, grads=1)
    assert {k: v.item() for k, v in chosen.items()} == {
        "present": 2055,
        "grads": 1,
        "batch_dims": 2,
        "layout": 1,
        "causal": 1,
        "window_left": 4,
        "window_right": -1,
        "deterministic": 1,
        "precision": 2,
        "scale": 0.5,
        "softcap": 3.0,
        "dropout_rate": 0.25,
    }


def test_every_operand_has_a_rank():
    assert {op: trailing_dims(op) for op in Operand}[Operand.MASK] == 3


def test_facts_are_plain_ints_and_complete():
    """Every fact that a native module asks for is one that the front end gives."""
    shape = jax.ShapeDtypeStruct
    operands = {
        Operand.Q: shape((2, 3, 4, 8), np.float32),
        Operand.K: shape((2, 5, 2, 8), np.float32),
        Operand.V: shape((2, 5, 2, 6), np.float32),
        Operand.BIAS: shape((1, 4, 1, 5), np.float16),
        Operand.MASK: shape((2, 1, 3, 1), np.bool_),
    }
    targets = [Target(op, (False,)) for op in (Operand.Q, Operand.K, Operand.V)]
    query = backends.make_query(AttentionSpec(scale=1.0), operands, targets)
    facts = query.facts("cpu")
    assert all(type(value) is int for value in facts.values())
    expected = {"B": 2, "Sq": 3, "Sk": 5, "Hq": 4, "Hkv": 2, "D": 8, "Dv": 6, "backward": 1}
    expected |= {"bias_heads": 4, "bias_rows": 1, "bias_cols": 5, "bias_batch": 1, "bias_dtype": 0}
    expected |= {"mask_heads": 1, "mask_rows": 3, "mask_cols": 1, "mask_batch": 2}
    assert {name: facts[name] for name in expected} == expected
    assert facts["summed"] == 0b111  # dq, dk and dv of a batch of 2 in a shape with batch 1
    sources = [*CORE.parent.glob("cuda/*.cc"), *CORE.parent.glob("metal/*.mm")]
    asked = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        asked |= set(re.findall(r'fact\(\w+, "(\w+)"\)', text))
    assert {"D", "Dv", "dtype", "backward"} <= asked
    assert asked <= set(facts)


class TestImportGuard:
    def test_accepts_equal_and_older_headers(self):
        native.check_versions(spec.INTERFACE_VERSION, (0, 1), (0, 1))
        native.check_versions(spec.INTERFACE_VERSION, (0, 1), (0, 5))
        native.check_versions(spec.INTERFACE_VERSION, (0, 1), None)

    def test_refuses_newer_headers_with_the_remedy(self):
        with pytest.raises(ImportError, match=r"built with XLA FFI 0\.4.*has 0\.1.*Reinstall"):
            native.check_versions(spec.INTERFACE_VERSION, (0, 4), (0, 1))
        with pytest.raises(ImportError, match=r"XLA FFI 1\.0"):
            native.check_versions(spec.INTERFACE_VERSION, (1, 0), (0, 5))

    @pytest.mark.parametrize("version", [None, spec.INTERFACE_VERSION + 1])
    def test_refuses_another_interface(self, version):
        with pytest.raises(ImportError, match=r"interface version.*Reinstall"):
            native.check_versions(version, (0, 1), (0, 5))

    def test_reads_the_installed_header(self):
        major, minor = native.installed_ffi_version()
        assert major == 0
        assert minor >= 1

    def test_registers_nothing_when_it_refuses(self, monkeypatch):
        package = types.ModuleType(native.PACKAGE)
        package.BUILT_BACKENDS = ("cpu",)
        module = types.ModuleType(f"{native.PACKAGE}.cpu")
        module.interface_version = spec.INTERFACE_VERSION
        module.ffi_version = (9, 9)
        module.registrations = lambda: pytest.fail("registered")
        monkeypatch.setitem(sys.modules, native.PACKAGE, package)
        monkeypatch.setitem(sys.modules, f"{native.PACKAGE}.cpu", module)
        with pytest.raises(ImportError, match=r"XLA FFI 9\.9"):
            native.load.__wrapped__("cpu")


class FakeCuda(types.ModuleType):
    """A module with a workspace, to lower for a platform that this machine does not have."""

    def explain(self, facts):
        return ("", "flash_attention: D too large") if facts["D"] > 64 else ("fake", "")

    def workspace_bytes(self, facts):
        assert facts["B"] > 0
        return 256 * facts["B"] * (1 + facts["backward"])


class TestWorkspaceResult:
    """CUDA's targets end in a uint8 result whose size the module gives."""

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch):
        load = native.load
        loaded = native.Loaded(FakeCuda("cuda"), "")
        monkeypatch.setattr(native, "load", lambda name: loaded if name == "cuda" else load(name))
        # Rules that were lowered with the fake module must not serve anybody else.
        jax.clear_caches()
        yield
        jax.clear_caches()

    def lowered(self, batch, D=8):
        def loss(q, k):
            return flash_attention(q, k, k, implementation="native").sum()

        shape = jax.ShapeDtypeStruct
        q, k = shape((batch, 5, 4, D), np.float32), shape((batch, 7, 2, D), np.float32)
        return export.export(
            jax.jit(jax.grad(loss, (0, 1))),
            platforms=["cuda"],
            disabled_checks=jax_flashtrain.export_disabled_checks,
        )(q, k).mlir_module()

    def test_static_batch(self):
        text = self.lowered(3)
        forward = re.search(rf"@{native.FORWARD_TARGET}.*-> (\(.*\))", text).group(1)
        backward = re.search(rf"@{native.BACKWARD_TARGET}.*-> (\(.*\))", text).group(1)
        assert "tensor<768xui8>" in forward
        assert "tensor<1536xui8>" in backward
        assert backward.count("xf32>") == 3  # dq, dk, dv: the workspace is not one of them

    def test_symbolic_batch(self):
        text = self.lowered(export.symbolic_shape("n")[0])
        assert re.search(rf"@{native.FORWARD_TARGET}.*tensor<\?xui8>", text)

    def test_reason_of_the_module_reaches_the_user(self):
        with pytest.raises(NotImplementedError, match="cannot run here: D too large"):
            self.lowered(2, D=65)


WITHOUT_NATIVE = """
import sys, warnings
sys.modules["jax_flashtrain_native"] = None
import jax, jax.numpy as jnp, jax_flashtrain
x = jnp.ones((1, 4, 2, 8))
reason = "the compiled package jax_flashtrain_native is not installed"
assert jax_flashtrain.explain(x, x, x) == ("jax", "blockwise", reason)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        jax.grad(lambda x: jax_flashtrain.flash_attention(x, x, x).sum())(x)
        x = jnp.ones((1, 5, 2, 8))
texts = [str(w.message) for w in seen if "flash_attention" in str(w.message)]
assert texts == ["flash_attention: runs as blockwise JAX code: " + reason], texts
try:
    jax_flashtrain.flash_attention(x, x, x, implementation="native")
except NotImplementedError as error:
    assert reason in str(error)
else:
    raise SystemExit("native ran without a native package")
"""


def test_works_without_the_native_package_and_warns_once():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
