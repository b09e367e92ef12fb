"""Compile Metal source text into a shared library that the emulator runs (Linux only).

Plays the part of MTLDevice.newLibraryWithSource: the stub runtime calls it with the source that the
host code embeds. The text goes to clang unchanged, except that the attribute
``[[threadgroup(n)]]`` is blanked (its name is a macro of the shim). Steps: C++14 to LLVM IR against
the shim; checks for what MSL lacks; a call to the machine before every access to device and
threadgroup memory; a shared library.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SHIM = HERE / "shim"

FLAGS = [
    "-std=c++14",
    "-pedantic-errors",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wdouble-promotion",
    "-Wno-unknown-attributes",  # [[buffer(0)]] and friends
    "-Wno-ignored-attributes",
    "-Wno-unused-function",
    "-Wno-unused-parameter",
    "-Wno-unused-const-variable",
    "-Wno-pass-failed",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-ffp-contract=off",
    "-nostdinc++",
    "-fno-builtin-memcpy",
    "-fno-builtin-memset",
]
if os.uname().machine == "x86_64":
    FLAGS += ["-mf16c"]

THREAD_ATTRIBUTES = {
    "threadgroup_position_in_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "threadgroups_per_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "thread_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
}

SIZES = {
    "i1": 1,
    "i8": 1,
    "i16": 2,
    "half": 2,
    "bfloat": 2,
    "i32": 4,
    "float": 4,
    "i64": 8,
    "ptr": 8,
}


class CompileError(Exception):
    """The source is not acceptable; the message is what a Metal compiler would have said."""


def strip_comments(text: str) -> str:
    """Blank comments and string literals, keep every line where it is."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\""
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


def check_address_spaces(code: str) -> None:
    """Every pointer and reference names its address space (`T* x`, `T& x` in our formatting)."""
    for match in re.finditer(r"[\w>][*&](?= \w|\)|>)", code):
        start = max(code.rfind(c, 0, match.start()) for c in ";{}(),<")
        declaration = code[start + 1 : match.end()]
        if not re.search(r"\b(device|constant|threadgroup|thread)\b", declaration):
            raise CompileError(f"error: pointer type without address space: {declaration.strip()}")


def split_top(text: str, separator: str = ",") -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def parse_kernels(code: str) -> list[tuple[str, list[dict[str, str]]]]:
    kernels = []
    for match in re.finditer(r"\bkernel\s+void\s+(\w+)\s*\(", code):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        arguments = []
        for text in split_top(code[match.end() : end - 1]):
            found = re.fullmatch(r"\s*(.*?)(\w+)\s*\[\[(.*)\]\]\s*", text, flags=re.S)
            if not found:
                raise CompileError(f"kernel {match[1]}: argument without attribute: {text.strip()}")
            type_, name, attribute = (s.strip() for s in found.groups())
            argument = {
                "type": type_,
                "name": name,
                "kind": "thread",
                "index": attribute,
                "flag": "",
            }
            for item in split_top(attribute):
                call = re.fullmatch(r"\s*(buffer|threadgroup|function_constant)\((.*)\)\s*", item)
                if call and call[1] == "function_constant":
                    argument["flag"] = call[2]
                elif call:
                    argument["kind"], argument["index"] = call[1], call[2]
                elif item.strip() not in THREAD_ATTRIBUTES:
                    raise CompileError(f"kernel {match[1]}: unknown attribute {item.strip()}")
            check_argument(match[1], argument)
            arguments.append(argument)
        kernels.append((match[1], arguments))
    return kernels


def check_argument(kernel: str, argument: dict[str, str]) -> None:
    type_, kind = argument["type"], argument["kind"]
    if kind == "thread":
        wanted = THREAD_ATTRIBUTES[argument["index"]]
        if type_ != wanted:
            raise CompileError(f"kernel {kernel}: {argument['name']} must be {wanted}, got {type_}")
        return
    spaces = {"buffer": ("device", "constant"), "threadgroup": ("threadgroup",)}[kind]
    if type_.split()[0] not in spaces or type_[-1] not in "*&":
        raise CompileError(
            f"kernel {kernel}: {argument['name']} must point to {' or '.join(spaces)}"
        )


def parse_constants(code: str) -> list[tuple[str, str, str]]:
    pattern = r"\bconstant\s+(bool|uint|int|float)\s+(\w+)\s*\[\[function_constant\((.*?)\)\]\]\s*;"
    return re.findall(pattern, code)


def entries(kernels: list, constants: list) -> str:
    """C++ that lets the stub runtime list and call the kernels."""
    out = ["", '#line 1 "emulator_entries"', 'extern "C" { const EmuApi* emu_api; }']
    for space in (1, 3):
        api = {1: "device_access", 3: "threadgroup_access"}[space]
        qualifier = {1: "device", 3: "threadgroup"}[space]
        out.append(
            f'extern "C" __attribute__((used)) void emu_trace_{space}({qualifier} void* p, '
            f"ulong n, int w) {{ emu_api->{api}((ulong)p, n, w); }}"
        )
    out.append(
        "struct EmuArgInfo { int kind, index; const char* name; const void* flag; };\n"
        "struct EmuKernelInfo { const char* name; void (*entry)(EmuArguments*); int count; "
        "const EmuArgInfo* arguments; };\n"
        "struct EmuConstantInfo { const char* name; int index, bytes; void* value; };"
    )
    rows = []
    for name, arguments in kernels:
        values, infos = [], []
        for a in arguments:
            base = a["type"].rstrip("*&").strip()
            star = "*" if a["type"].endswith("&") else ""
            if a["kind"] == "thread":
                field = f"a->ids.{a['index']}"
                vector = f"uint3{{{field}[0], {field}[1], {field}[2]}}"
                values.append(vector if a["type"] == "uint3" else field)
                continue
            array = "buffer" if a["kind"] == "buffer" else "arena"
            values.append(f"{star}({base}*)a->{array}[{a['index']}]")
            flag = f"(const void*)&{a['flag']}" if a["flag"] else "nullptr"
            kind = int(a["kind"] == "threadgroup")
            infos.append(f'{{{kind}, {a["index"]}, "{a["name"]}", {flag}}}')
        call = ",\n    ".join(values)
        out.append(f"void emu_entry_{name}(EmuArguments* a) {{\n  {name}({call});\n}}")
        out.append(f"const EmuArgInfo emu_args_{name}[] = {{{', '.join(infos)}}};")
        rows.append(f'{{"{name}", &emu_entry_{name}, {len(infos)}, emu_args_{name}}}')
    out.append(
        f'extern "C" {{ extern const EmuKernelInfo emu_kernels[{len(rows) + 1}]; '
        f"extern const EmuConstantInfo emu_constants[{len(constants) + 1}]; }}"
    )
    out.append(
        f"const EmuKernelInfo emu_kernels[{len(rows) + 1}] = "
        f"{{{', '.join([*rows, '{nullptr, nullptr, 0, nullptr}'])}}};"
    )
    rows = [f'{{"{n}", {i}, int(sizeof({t})), (void*)&{n}}}' for t, n, i in constants]
    out.append(
        f"const EmuConstantInfo emu_constants[{len(rows) + 1}] = "
        f"{{{', '.join([*rows, '{nullptr, 0, 0, nullptr}'])}}};"
    )
    if (
        os.uname().machine == "x86_64"
    ):  # what older libgcc lacks: round to nearest even, NaN stays NaN
        out.append("""
extern "C" __attribute__((weak)) bfloat __truncsfbf2(float x) {
  uint u = __builtin_bit_cast(uint, x);
  ushort r = (u & 0x7FFFFFFFu) > 0x7F800000u ? ushort((u >> 16) | 0x40u)
                                             : ushort((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  return __builtin_bit_cast(bfloat, r);
}""")
    return "\n".join(out) + "\n"


def check_language(ir: str, ast: str) -> None:
    """Refuse what compiles as C++14 but not as MSL."""
    if "LambdaExpr" in ast:
        raise CompileError("error: lambda expressions are not supported in Metal")
    calls: dict[str, set[str]] = {}
    current = ""
    for line in ir.splitlines():
        if found := re.match(r"define .*?@([\w.$]+)\(", line):
            current = found[1]
            calls[current] = set()
        elif line.startswith("}"):
            current = ""
        elif current:
            code = line.split(", !")[0]
            # arithmetic only: the x86 calling convention passes float2 as a double
            if re.search(
                r"\b(f(add|sub|mul|div|neg|cmp \w+) double|(fpext|[su]itofp) .* to double)\b", code
            ):
                raise CompileError(f"error: 'double' is not supported in Metal (in {current})")
            calls[current].update(re.findall(r"call .*?@([\w.$]+)\(", code))
    state: dict[str, int] = {}

    def visit(name: str) -> None:
        state[name] = 1
        for callee in calls.get(name, ()):
            if state.get(callee) == 1:
                raise CompileError(f"error: recursion is not supported in Metal (in {callee})")
            if callee not in state:
                visit(callee)
        state[name] = 2

    for name in calls:
        if name not in state:
            visit(name)


def type_bytes(type_: str) -> int:
    if vector := re.fullmatch(r"<(\d+) x (\w+)>", type_):
        return int(vector[1]) * SIZES[vector[2]]
    return SIZES[type_]


def instrument(ir: str) -> str:
    """Put a call before every load and store of address spaces 1 (device) and 3 (threadgroup)."""
    kind = r"(<\d+ x \w+>|\w+)"
    load = re.compile(rf"\s*%\S+ = load (?:volatile )?{kind}, ptr addrspace\(([13])\) ([^,]+),")
    store = re.compile(rf"\s*store (?:volatile )?{kind} .*, ptr addrspace\(([13])\) ([^,]+),")
    untraced = re.compile(
        r"(load [^,]+|store .*|atomicrmw .*|cmpxchg .*), ptr addrspace\([13]\) [^,]+, "
        r"|@llvm\.mem\w+.*addrspace\([13]\)"
    )
    out, traced = [], True
    for line in ir.splitlines():
        if line.startswith("define"):
            traced = "@emu_trace_" not in line
        found = load.match(line) or store.match(line)
        if found and traced:
            type_, space, pointer = found.groups()
            write = int("store" in line.split("addrspace")[0].split("=")[0])
            out.append(
                f"  call void @emu_trace_{space}(ptr addrspace({space}) {pointer}, "
                f"i64 {type_bytes(type_)}, i32 {write})"
            )
        elif traced and untraced.search(line) and not line.startswith(("declare", "define", ";")):
            raise CompileError(f"the emulator cannot trace: {line.strip()}")
        out.append(line)
    return "\n".join(out) + "\n"


def run(command: list[str], **options) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode:
        raise CompileError(result.stderr)
    return result.stdout


def compile_source(source: str, macros: list[str], output: pathlib.Path, clang: str) -> None:
    blanked = re.sub(r"\[\[threadgroup\(.*?\)\]\]", lambda m: " " * len(m.group()), source)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        path = pathlib.Path(folder)
        (path / "unit.cc").write_text(source)
        defines = [f"-D{m}" for m in macros]
        (path / "empty").mkdir()
        for header in SHIM.glob("metal_*"):
            (path / "empty" / header.name).touch()
        code = run(
            [
                clang,
                "-E",
                "-P",
                "-std=c++14",
                "-D__METAL_VERSION__=310",
                *defines,
                "-nostdinc",
                "-isystem",
                "empty",
                "unit.cc",
            ],
            cwd=path,
        )
        code = strip_comments(code)
        check_address_spaces(code)
        unit = (
            '#line 1 "program_source"\n'
            + blanked
            + entries(parse_kernels(code), parse_constants(code))
        )
        (path / "unit.cc").write_text(unit)
        base = [clang, *FLAGS, "-isystem", str(SHIM), *defines, "unit.cc"]
        ast = run(
            [*base, "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics"], cwd=path
        )
        check_language(run([*base, "-O0", "-S", "-emit-llvm", "-o", "-"], cwd=path), ast)
        ir = run(
            [*base, "-O1", "-fno-vectorize", "-fno-slp-vectorize", "-S", "-emit-llvm", "-o", "-"],
            cwd=path,
        )
        (path / "traced.ll").write_text(instrument(ir))
        run([clang, "-O1", "-shared", "-fPIC", "-w", "traced.ll", "-o", "out.so", "-lm"], cwd=path)
        os.replace(path / "out.so", output)  # atomic: several processes may compile the same source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--clang", default="clang++-19")
    parser.add_argument("-D", dest="macros", action="append", default=[])
    options = parser.parse_args()
    source = options.source.read_text()
    digest = hashlib.sha256()
    for part in (
        source,
        *options.macros,
        options.clang,
        *sorted(p.read_text() for p in SHIM.iterdir()),
        pathlib.Path(__file__).read_text(),
    ):
        digest.update(part.encode() + b"\0")
    options.cache.mkdir(parents=True, exist_ok=True)
    output = options.cache / f"{digest.hexdigest()[:32]}.so"
    try:
        if not output.exists():
            compile_source(source, options.macros, output, options.clang)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
