"""The modules of this repository that a Python file imports, from its syntax tree, without importing anything.

Includes imports inside functions and in strings: code for `python -c`, and module names after "-m".
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("shardwright", "benchmarks")
MODULE_OPTION = re.compile(r"(?<!\S)-m ((?:shardwright|benchmarks)(?:\.\w+)*)")


@dataclass(frozen=True, slots=True)
class Import:
    """`from module import name as bound`; `name` is empty if the module itself is imported."""

    line: int
    module: str
    name: str = ""
    bound: str = ""


def imports(tree: ast.AST) -> Iterator[Import]:
    """Imports of this repository's packages anywhere in a syntax tree, strings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if in_repository(alias.name):
                    yield Import(node.lineno, alias.name, bound=alias.asname or "")
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level and in_repository(node.module):
                for alias in node.names:
                    yield Import(node.lineno, node.module, alias.name, alias.asname or alias.name)
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            yield from _in_string(node)
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            yield from _after_module_option(node)


def in_repository(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def _in_string(node: ast.Constant | ast.JoinedStr) -> Iterator[Import]:
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "_" for part in node.values)
        text = "".join(map(str, parts))
    elif isinstance(node.value, str):
        text = node.value
    else:
        return
    for match in MODULE_OPTION.finditer(text):
        yield Import(node.lineno, match[1])
    if "import " in text and any(package in text for package in PACKAGES):
        try:
            code = ast.parse(textwrap.dedent(text))
        except SyntaxError:
            return  # prose
        for imported in imports(code):
            yield Import(node.lineno, imported.module, imported.name, imported.bound)


def _after_module_option(node: ast.List | ast.Tuple | ast.Call) -> Iterator[Import]:
    values = node.args if isinstance(node, ast.Call) else node.elts
    words = [value.value if isinstance(value, ast.Constant) else None for value in values]
    for option, module in zip(words, words[1:], strict=False):
        if option == "-m" and isinstance(module, str) and in_repository(module):
            yield Import(node.lineno, module)


def path_of(module: str) -> Path | None:
    """The file of a module of this repository."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def names(path: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top level."""
    return frozenset(_bound(ast.parse(path.read_text()).body))


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        else:
            yield from (
                child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
            )
            for field in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound(handler.body)


def unresolved(tree: ast.AST) -> Iterator[str]:
    """A line for each import, and each attribute of an imported module, that does not exist."""
    modules = {}
    for entry in imports(tree):
        path = path_of(entry.module)
        if path is None:
            yield f"line {entry.line}: no module {entry.module}"
        elif entry.name and path_of(f"{entry.module}.{entry.name}") is None and entry.name not in names(path):
            yield f"line {entry.line}: {entry.module} has no {entry.name}"
        elif entry.bound and (target := path_of(f"{entry.module}.{entry.name}" if entry.name else entry.module)):
            modules[entry.bound] = target
    for name in _rebound(tree):
        modules.pop(name, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            path = modules[node.value.id]
            if node.attr not in names(path) and not _has_submodule(path, node.attr) and node.attr != "__file__":
                yield f"line {node.lineno}: {path.relative_to(ROOT)} has no {node.attr}"


def _rebound(tree: ast.AST) -> Iterator[str]:
    """Names that the file also binds to something other than an imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def _has_submodule(path: Path, name: str) -> bool:
    return path.name == "__init__.py" and (path.with_name(f"{name}.py").is_file() or (path.parent / name).is_dir())


@cache
def _imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(imports(ast.parse(path.read_text())))


@cache
def dependencies(module: str) -> frozenset[Path]:
    """The files that a module depends on: itself, all transitive imports, and csrc if it uses the compiled kernels.

    A package's __init__ counts only if a name is imported from it, not as the parent of an imported submodule.
    """
    paths: set[Path] = set()
    pending = [module]
    while pending:
        path = path_of(pending.pop())
        if path is None or path in paths:
            continue
        paths.add(path)
        for imported in _imports_of(path):
            submodule = f"{imported.module}.{imported.name}"
            pending.append(submodule if imported.name and path_of(submodule) else imported.module)
    if ROOT / "shardwright/library.py" in paths:
        paths.update(path for path in (ROOT / "csrc").iterdir() if path.is_file())
    if (counter_script := ROOT / "benchmarks/live_memory.py") in paths:
        paths.add(counter_script.with_suffix(".cpp"))
    return frozenset(paths)
