"""The documentation holds what it says: its code runs, its links lead somewhere, its numbers are
those of the result files, its figures those of the code.

``python`` blocks run in order, in one namespace per page; ``pycon`` blocks are interactive sessions
(also tracebacks) in the same namespace, and print exactly what the page shows; ``console`` blocks
are command lines of the trainer with what it answers.
"""

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import pathlib
import re
import shlex
import sys
import types

import jax
import pytest

import jax_flashtrain
from jax_flashtrain import nn
from jax_flashtrain._src import lowering, native
from jax_flashtrain.train import cli, report

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```(python|pycon|console)\n(.*?)^```", re.M | re.S)
WITH_CODE = [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))]
OUTPUT = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def load_script(path):
    """A module outside the packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]  # scripts put the checkout in front; tests run the installed package
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


page_script = load_script(ROOT / "benchmarks" / "page.py")


@pytest.fixture(autouse=True)
def settings():
    """JAX adds a note to the errors whose tracebacks it shortens; a page shows the error alone.

    Pages compare float32 numbers to 1e-5, which holds on a GPU at full precision only.
    """
    wanted = {"jax_traceback_filtering": "off"}
    if jax.default_backend() != "cpu":
        wanted["jax_default_matmul_precision"] = "highest"
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lowering, "_warned", set())  # a warning comes once per process
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        kind, code = block.groups()
        if kind == "python":
            # The line numbers of a traceback are those of the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        elif kind == "pycon":
            run_session(code, namespace, page, line)
        elif jax.default_backend() == "cpu":  # what the trainer says on a machine without a GPU
            for command in re.findall(r"^\$ .*\n(?:[^$].*\n)*", code, flags=re.M):
                run_command(*command.split("\n", 1))


def run_session(code, namespace, page, line):
    session = doctest.DocTestParser().get_doctest(code, {}, name_of(page), str(page), line)
    session.globs = namespace
    output = []
    runner = doctest.DocTestRunner(optionflags=OUTPUT)
    runner.run(session, out=output.append, clear_globs=False)
    assert not runner.failures, "".join(output)


def run_command(command, answer):
    words = shlex.split(command)
    assert words[:4] == ["$", "python", "-m", "jax_flashtrain.train"], command
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        cli.main(words[4:])
    got = printed.getvalue()
    assert doctest.OutputChecker().check_output(answer, got, OUTPUT), f"{command}\n{got}"


def test_reasons_of_other_installations(monkeypatch, capsys):
    """What docs/troubleshooting.md quotes and this machine does not say, made to be said."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    load = native.load.__wrapped__  # without its cache
    with monkeypatch.context() as patch:
        patch.setattr(native, "PACKAGE", "jax_flashtrain_nowhere")
        missing = load("cpu").reason.replace("jax_flashtrain_nowhere", "jax_flashtrain_native")
    package = types.SimpleNamespace(BUILT_BACKENDS=())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, native.PACKAGE, package)
        reasons = [missing, *(load(name).reason for name in ("cuda", "metal"))]
    for reason in reasons:
        assert f"| `{reason}` |" in text
    monkeypatch.setattr(report.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(report.jax, "default_backend", lambda: "cpu")
    assert f"\n{report.unused_gpu_warning()}\n" in text
    monkeypatch.setattr(cli, "_importable", lambda module: False)
    assert cli.main([]) == 2
    assert f"\n{capsys.readouterr().err}" in text


def test_figures_are_those_of_the_code():
    """After a change of the rules or the script: ``python docs/figures/draw.py``."""
    draw = load_script(DOCS / "figures" / "draw.py")
    for name in draw.FIGURES:
        assert draw.svg.drawn_from(DOCS / "figures" / name) == draw.source(), name


def headings(page):
    """Anchors as GitHub and MkDocs make them from headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*?)(?:#([^)]*))?\)", text):
        if target.startswith(("http://", "https://")):
            continue
        there = (page.parent / target) if target else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in headings(there), f"{target}#{anchor}"


def test_every_example_is_listed():
    text = (DOCS / "examples.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(\.\./(examples/\w+\.py)\)", text))
    assert listed == {name_of(p) for p in (ROOT / "examples").glob("*.py")}


TOP = r"(?:cpp|jax_flashtrain|tests|docs|benchmarks|cmake|examples|\.ci)"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    for name in re.findall(rf"`({TOP}/[\w./*-]*)`", page.read_text(encoding="utf-8")):
        assert list(ROOT.glob(name)), name


@pytest.mark.parametrize(
    ("page", "package"), [("operator", jax_flashtrain), ("nn", nn)], ids=["jax_flashtrain", "nn"]
)
def test_reference_names_everything_public(page, package):
    text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: [\w.]*?(\w+)$", text, flags=re.M)) | set(
        re.findall(r"`(\w+)`", text)
    )
    assert set(package.__all__) <= shown
    for path in re.findall(r"^::: ([\w.]+)$", text, flags=re.M):
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert found is getattr(package, name), path


# ---- the benchmark page --------------------------------------------------------------------------


def test_benchmark_page_is_that_of_the_results():
    """After a new result: ``python benchmarks/page.py``."""
    found = page_script.sections()
    assert set(found) == set(page_script.RESULTS.glob("*.json"))
    assert page_script.PAGE.read_text(encoding="utf-8") == page_script.page(found)
    for section in found.values():
        scripts = re.findall(r"(?:python|bash) (\S+\.(?:py|sh))", section.command)
        others = ("python -m jax_flashtrain.train.compare ", "pytest ")
        assert scripts or section.command.startswith(others), section.command
        assert all((ROOT / script).is_file() for script in scripts)
    plots = {page_script.figure_of(path): s.bars for path, s in found.items() if s.bars}
    assert set(plots) == set((DOCS / "figures").glob("bench-*.svg"))
    for path, bars in plots.items():
        assert page_script.svg.drawn_from(path) == page_script.source(bars), path


CPU_ROW = {
    "shape": "float32 B1 S1024 H8 D64 causal",
    "pass": "fwd",
    "kernel": "avx512",
    "error": 1e-6,
    "native": {"gflop_per_cpu_s": 60.0},
    "roof": {"gflop_per_cpu_s": 80.0},
    "torch SDPA": {"gflop_per_cpu_s": 30.0, "native_speedup_quartiles": [1.9, 2.0, 2.1]},
    "share_of_roof": 0.75,
}
DOCUMENTS = {
    "cpu": {
        "backend": "cpu",
        "device": "a processor",
        "threads": 2,
        "versions": {"jax": "1", "torch": None},
        "commit": "c",
        "date": "2026-12-01T00:00:00",
        "rounds": 5,
        "rows": [CPU_ROW],
    },
    "rows": {
        "what": "Something else",
        "command": "python benchmarks/else.py",
        "backend": "cpu",
        "commit": "c",
        "rows": [
            {"name": "a", "cpu_s": {"x": 1.25}, "x_quartiles": [1, 2, 3]},
            {"name": "b", "cpu_s": {"x": 2.5, "y": 3}},
        ],
    },
    "loss": {
        "tokens": 32,
        "vocab": 64,
        "dim": 8,
        "chunk": 16,
        "dtype": "f32",
        "rounds": 3,
        "device": "a device",
        "versions": {"jax": "1"},
        "rows": [
            {"loss": "chunked", "milliseconds": 1.0, "cpu_milliseconds": 2.0, "temp_bytes": 1024}
        ],
    },
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_benchmark_page_reads_every_kind(kind, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(DOCUMENTS[kind]))
    _, section = page_script.read(path)
    assert section.command.startswith("python benchmarks/")
    if kind == "cpu":
        line = "| float32 B1 S1024 H8 D64 causal | fwd | 60 | 75 % | 30 (2.00) |"
        assert line in section.tables[0]
        page_script.draw(section.bars, tmp_path / "x.svg")
        assert page_script.svg.drawn_from(tmp_path / "x.svg") == page_script.source(section.bars)
    if kind == "rows":
        assert section.tables[0].splitlines()[0] == "| name | cpu s x | cpu s y |"
        assert section.tables[0].splitlines()[-1] == "| b | 2.5 | 3 |"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [{"speed": 1}]}',
        '{"backend": "cuda", "rows": [{"shape": "x"}]}',
        '{"what": "t", "command": "c", "rows": [{"x": [1]}]}',
    ],
)
def test_benchmark_page_refuses_what_it_cannot_read(text, tmp_path):
    path = tmp_path / "strange.json"
    path.write_text(text)
    with pytest.raises(page_script.UnreadableError, match=r"strange\.json: "):
        page_script.sections(tmp_path)
