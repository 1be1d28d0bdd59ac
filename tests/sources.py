"""The package's source files as text, syntax nodes, imports, uses of names, and classes; parsed, never imported.

The architecture gates (gates.py) check rules on them.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "shardwright"
NATIVE_SUFFIXES = (".cpp", ".h")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """`imports`: (line, full name of what is imported); `names`: name that an import binds -> its full name."""

    path: str
    text: str
    nodes: tuple[ast.AST, ...]
    imports: tuple[tuple[int, str], ...]
    names: Mapping[str, str]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def inner_path(self) -> str:
        """Path inside the package: comm/mesh.py."""
        return self.path.removeprefix(f"{PACKAGE}/")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def dotted(self, node: ast.AST) -> str | None:
        """`dist.all_reduce` -> "torch.distributed.all_reduce", by the imports; None if it is not a dotted name."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.dotted(node.value)):
            return f"{owner}.{node.attr}"
        return None


def sources(root: Path, *, native: bool = False) -> list[Source]:
    """The package's Python files; with `native` also the C++ files of csrc."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    assert files, f"no Python files under {root / PACKAGE}: is this the repository's root?"
    if native:
        files += sorted(path for path in (root / "csrc").rglob("*") if path.suffix in NATIVE_SUFFIXES)
    return [_source(path.relative_to(root).as_posix(), path.read_text()) for path in files]


@cache
def _source(path: str, text: str) -> Source:
    nodes = tuple(ast.walk(ast.parse(text, path))) if path.endswith(".py") else ()
    imports = [entry for node in nodes for entry in _imports(path, node)]
    names = {name: full for _, name, full in imports if name}
    return Source(path, text, nodes, tuple((line, full) for line, _, full in imports), names)


def _imports(path: str, node: ast.AST) -> Iterator[tuple[int, str | None, str]]:
    """(line, name that it binds, full name) of each import; None as name for `import a.b`, which binds a itself."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.asname, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = path.removesuffix(".py").split("/")[: -node.level] if node.level else []
        origin = ".".join([*parents, node.module] if node.module else parents)
        yield from ((node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}") for alias in node.names)


def functions(root: Path) -> Iterator[tuple[Source, Function]]:
    return ((source, node) for source in sources(root) for node in source.nodes if isinstance(node, Function))


@cache
def uses(source: Source) -> tuple[tuple[int, str], ...]:
    """(line, import or dotted name), calls with their constant arguments: numpy.load(_, allow_pickle=True)."""
    calls = {id(node.func): node for node in source.nodes if isinstance(node, ast.Call)}
    by_line = list(source.imports)
    for node in source.nodes:
        if isinstance(node, ast.expr) and (name := source.dotted(node)):
            by_line.append((node.lineno, name + _arguments(calls.get(id(node)))))
    return tuple(sorted(by_line))


def _arguments(call: ast.Call | None) -> str:
    if call is None:
        return ""
    pairs = [("", value) for value in call.args] + [(f"{keyword.arg}=", keyword.value) for keyword in call.keywords]
    texts = (key + (repr(value.value) if isinstance(value, ast.Constant) else "_") for key, value in pairs)
    return f"({', '.join(texts)})"


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the package; `parents`: full names of its bases that are classes of the package."""

    source: Source
    node: ast.ClassDef
    parents: tuple[str, ...]

    @property
    def methods(self) -> list[Function]:
        return [node for node in self.node.body if isinstance(node, Function)]


def classes(root: Path) -> dict[str, Class]:
    """Full name -> class; the full name is that of the module that defines it."""
    modules = {source.module: source for source in sources(root)}
    definitions = {
        f"{source.module}.{node.name}": (source, node)
        for source in modules.values()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    by_name = {}
    for name, (source, node) in definitions.items():
        bases = (_resolve_reexports(modules, _base_name(source, base)) for base in node.bases)
        by_name[name] = Class(source, node, tuple(base for base in bases if base in definitions and base != name))
    return by_name


def _base_name(source: Source, base: ast.expr) -> str:
    name = source.dotted(base.value if isinstance(base, ast.Subscript) else base) or ""
    return name if "." in name else f"{source.module}.{name}"


def _resolve_reexports(modules: Mapping[str, Source], name: str) -> str:
    """The full name in the module that defines it."""
    owner, _, last = name.rpartition(".")
    target = modules[owner].names.get(last) if owner in modules else None
    return _resolve_reexports(modules, target) if target else name


def ancestors(name: str, by_name: Mapping[str, Class]) -> Iterator[str]:
    """Full names of all base classes, direct and indirect, that belong to the package."""
    for parent in by_name[name].parents:
        yield parent
        yield from ancestors(parent, by_name)
