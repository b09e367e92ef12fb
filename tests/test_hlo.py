"""What the compiled programs hold: one custom call, no copies before it, the named residuals."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flashtrain import flash_attention

FORWARD, BACKWARD = "jax_flashtrain_fwd_v1", "jax_flashtrain_bwd_v1"


def program(function, *args) -> str:
    """The optimised HLO of a function, without its metadata."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.sub(r", metadata=\{[^}]*\}", "", text)


def instructions(text: str) -> dict[str, tuple[str, list[str]]]:
    """name -> (opcode, operand names) of the entry computation."""
    entry = text[text.index("ENTRY") :]
    found = {}
    for line in entry.splitlines():
        m = re.match(r"\s*(?:ROOT )?(%[\w.-]+) = (?:\([^()]*\)|\S+) ([\w-]+)\((.*)", line)
        if m:
            inside = re.split(r"\), ?\w+=|\)$", m.group(3))[0]
            found[m.group(1)] = (m.group(2), re.findall(r"%[\w.-]+", inside))
    return found


def calls(text: str, target: str) -> int:
    return text.count(f'custom_call_target="{target}"')


def kinds_before_the_call(text: str, target: str) -> set[str]:
    """Opcodes on the way from the parameters to the custom call."""
    found = instructions(text)
    line = next(row for row in text.splitlines() if f'"{target}"' in row)
    pending = list(found[re.match(r"\s*(?:ROOT )?(%[\w.-]+)", line).group(1)][1])
    assert pending
    kinds = set()
    while pending:
        kind, operands = found[pending.pop()]
        kinds.add(kind)
        pending += operands
    return kinds


def qkv(D, layout, dtype=jnp.float32):
    q, k = (2, 7, 4, D), (2, 9, 2, D)
    if layout == "BNTH":
        q, k = (2, 4, 7, D), (2, 2, 9, D)
    return jnp.ones(q, dtype), jnp.ones(k, dtype), jnp.ones(k, dtype)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("D", [1, 17, 72])
class TestNothingBeforeTheCall:
    def test_forward(self, D, layout):
        def call(q, k, v):
            return flash_attention(q, k, v, causal=True, layout=layout, implementation="native")

        text = program(call, *qkv(D, layout))
        assert calls(text, FORWARD) == 1
        assert kinds_before_the_call(text, FORWARD) == {"parameter"}

    def test_backward(self, D, layout):
        q, k, v = qkv(D, layout)

        def grads(q, k, v, do):
            def call(q, k, v):
                return flash_attention(q, k, v, causal=True, layout=layout, implementation="native")

            return jax.vjp(call, q, k, v)[1](do)

        text = program(grads, q, k, v, q)
        assert (calls(text, FORWARD), calls(text, BACKWARD)) == (1, 1)
        kinds = kinds_before_the_call(text, BACKWARD)
        assert kinds == {"parameter", "custom-call", "get-tuple-element"}


def test_operands_of_every_kind_reach_the_call_unchanged():
    q, k, v = qkv(8, "BTNH")
    ids = (jnp.zeros((2, 7), jnp.int32), jnp.zeros((2, 9), jnp.int32))
    mask, bias = jnp.ones((1, 1, 9), bool), jnp.ones((2, 1, 7, 1))
    lengths = jnp.array([5, 7], jnp.int32)

    def call(q, k, v, ids, mask, bias, lengths):
        return flash_attention(
            q,
            k,
            v,
            segment_ids=ids,
            mask=mask,
            bias=bias,
            q_lengths=lengths,
            sinks=bias[0, 0, :4, 0],
            implementation="native",
        )

    text = program(call, q, k, v, ids, mask, bias, lengths)
    kinds = kinds_before_the_call(text, FORWARD)
    assert kinds <= {"parameter", "bitcast", "slice", "fusion"}, (
        kinds
    )  # the slice is the test's own
    # Mask and bias keep the sizes of 1 that they came with.
    layouts = re.search(r"operand_layout_constraints=\{(.*?)\}, api", text).group(1)
    assert "pred[1,1,1,9]" in layouts
    assert "f32[2,1,7,1]" in layouts


def test_layouts_are_pinned_row_major_for_transposed_inputs():
    """A16: a transpose before the call becomes a copy, never another layout of the operand."""
    q, k, v = qkv(8, "BTNH")

    def call(q, k, v):
        turned = (x.swapaxes(1, 2) for x in (q, k, v))
        return flash_attention(*turned, implementation="native")

    text = program(call, *(x.swapaxes(1, 2) for x in (q, k, v)))
    constraints = re.search(r"operand_layout_constraints=\{(.*?)\}, api", text).group(1)
    assert set(re.findall(r"\]\{([\d,]+)\}", constraints)) == {"3,2,1,0"}


class TestNestedVmap:
    """One custom call, no loop, and unmapped operands keep a dimension of 1."""

    q = np.ones((3, 5, 2, 7, 4, 8), np.float32)
    k = np.ones((2, 9, 2, 8), np.float32)
    v = np.ones((5, 2, 9, 2, 8), np.float32)
    bias = np.ones((1, 1, 1, 9), np.float32)

    def nested(self, function):
        inner = jax.vmap(function, in_axes=(0, None, None, None))
        return jax.vmap(inner, in_axes=(1, None, 0, None))

    def attend(self, q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, implementation="native")

    def test_forward(self):
        text = program(self.nested(self.attend), self.q, self.k, self.v, self.bias)
        assert calls(text, FORWARD) == 1
        assert "while" not in text
        assert kinds_before_the_call(text, FORWARD) <= {"parameter", "bitcast"}
        layouts = re.search(r"operand_layout_constraints=\{(.*?)\}, api", text).group(1)
        for shape in ("[3,5,2,7,4,8]", "[1,1,2,9,2,8]", "[1,5,2,9,2,8]", "[1,1,1,1,1,9]"):
            assert shape in layouts, layouts

    def test_backward(self):
        def loss(*args):
            return (self.attend(*args) ** 2).sum()

        grads = self.nested(jax.grad(loss, (0, 1, 2, 3)))
        text = program(grads, self.q, self.k, self.v, self.bias)
        assert (calls(text, FORWARD), calls(text, BACKWARD)) == (1, 1)
        assert "while" not in text
        row = next(r for r in text.splitlines() if f'"{BACKWARD}"' in r)
        results = row.split(" custom-call(")[0]
        for shape in ("[3,5,2,7,4,8]", "[3,5,2,9,2,8]", "[3,5,1,1,1,9]"):
            assert shape in results, results
        assert "f32[1,1,2,9,2,8]" in row  # k itself came in without the mapped sizes

    def test_integer_operands(self):
        lengths = jnp.array([[3, 9]] * 6, jnp.int32)

        def call(q, lengths):
            return flash_attention(q, self.k, self.k, kv_lengths=lengths, implementation="native")

        text = program(jax.vmap(call, in_axes=(None, 0)), jnp.ones((2, 7, 4, 8)), lengths)
        assert calls(text, FORWARD) == 1
        layouts = re.search(r"operand_layout_constraints=\{(.*?)\}, api", text).group(1)
        assert "f32[1,2,7,4,8]" in layouts
        assert "s32[6,2]" in layouts


def test_grad_of_vmap_gives_unmapped_gradients_directly_in_jvp_mode():
    k = jnp.ones((2, 9, 2, 8))

    def loss(q, k, v):
        def call(q, k, v):
            return flash_attention(q, k, v, implementation="native", autodiff="jvp")

        return (jax.vmap(call, in_axes=(0, None, None))(q, k, v) ** 2).sum()

    text = program(jax.grad(loss, (0, 1, 2)), jnp.ones((5, 2, 7, 4, 8)), k, k)
    row = next(r for r in text.splitlines() if f'"{BACKWARD}"' in r)
    results = row.split(" custom-call(")[0]
    assert results.count("f32[1,2,9,2,8]") == 2, results


def test_bias_gradient_is_computed_only_when_wanted():
    q, k, v = qkv(8, "BTNH")
    bias = jnp.ones((4, 7, 9))

    def loss(q, bias):
        return flash_attention(q, k, v, bias=bias, implementation="native").sum()

    for argnums, grads in ((0, 0), ((0, 1), 1)):
        text = program(jax.grad(loss, argnums), q, bias)
        row = next(r for r in text.splitlines() if f'"{BACKWARD}"' in r)
        assert f"grads = {grads} : i64" in row


@pytest.mark.parametrize("autodiff", ["vjp", "jvp"])
def test_checkpoint_policy_saves_the_forward_kernel(autodiff):
    """A20."""
    q, k, v = qkv(8, "BTNH")

    def layer(q):
        attended = flash_attention(
            jnp.sin(q), k, v, causal=True, implementation="native", autodiff=autodiff
        )
        return jnp.sin(2 * attended)

    def run(**options):
        def loss(q):
            return (jax.checkpoint(layer, **options)(q) ** 2).sum()

        # The lowered program: XLA on the CPU may merge a recomputed call with the first one again.
        return jax.jit(jax.value_and_grad(loss)).lower(q).as_text(), jax.grad(loss)(q)

    save = jax.checkpoint_policies.save_only_these_names
    named, grad_named = run(policy=save("flashtrain_out", "flashtrain_lse"))
    plain, grad_plain = run()
    out_only, _ = run(policy=save("flashtrain_out"))
    assert named.count(f"@{FORWARD}") == 1
    assert plain.count(f"@{FORWARD}") == 2
    assert out_only.count(f"@{FORWARD}") == 2  # both names are needed
    assert named.count(f"@{BACKWARD}") == plain.count(f"@{BACKWARD}") == 1
    assert jnp.array_equal(grad_named, grad_plain)


def test_jax_implementation_holds_no_custom_call():
    q, k, v = qkv(8, "BTNH")
    text = program(lambda q: flash_attention(q, k, v, implementation="jax"), q)
    assert "custom_call_target" not in text


def test_donated_buffers():
    q, k, v = qkv(8, "BTNH")

    def step(q):
        return q - 0.1 * jax.grad(lambda q: flash_attention(q, k, v).sum())(q)

    expected = step(q)
    text = jax.jit(step, donate_argnums=0).lower(q).compile().as_text()
    assert "input_output_alias" in text
    assert jnp.array_equal(jax.jit(step, donate_argnums=0)(q.copy()), expected)


def test_equal_calls_trace_and_compile_once():
    """A34."""
    q, k, v = qkv(8, "BTNH")
    traces = []

    @jax.jit
    def call(q, offset):
        traces.append(1)
        return flash_attention(q, k, v, causal=True, q_offset=offset)

    for n in range(100):
        call(q, n)
    assert len(traces) == 1
    assert call._cache_size() == 1
