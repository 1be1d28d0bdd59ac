"""What the architecture gates see of a tree: its files as text, syntax nodes, imports, uses and classes.

Apart from gates.py so that a gate is only its rule. It parses, never imports, and judges nothing.
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
    """`imports`: (line, full name of what is imported); `names`: a name an import binds -> that full name."""

    path: str
    text: str
    nodes: tuple[ast.AST, ...]
    imports: tuple[tuple[int, str], ...]
    names: Mapping[str, str]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def place(self) -> str:
        """The path inside the package: comm/mesh.py."""
        return self.path.removeprefix(f"{PACKAGE}/")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def dotted(self, node: ast.AST) -> str | None:
        """`dist.all_reduce` -> "torch.distributed.all_reduce", imports resolved; None unless all names."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.dotted(node.value)):
            return f"{owner}.{node.attr}"
        return None


def sources(root: Path, *, native: bool = False) -> list[Source]:
    """The package's Python files, and on request the C++ ones."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    assert files, f"no Python files under {root / PACKAGE}: is this the repository's root?"
    if native:
        files += sorted(path for path in (root / "csrc").rglob("*") if path.suffix in NATIVE_SUFFIXES)
    return [_source(path.relative_to(root).as_posix(), path.read_text()) for path in files]


@cache
def _source(path: str, text: str) -> Source:
    nodes = tuple(ast.walk(ast.parse(text, path))) if path.endswith(".py") else ()
    found = [entry for node in nodes for entry in _imports(path, node)]
    names = {name: full for _, name, full in found if name}
    return Source(path, text, nodes, tuple((line, full) for line, _, full in found), names)


def _imports(path: str, node: ast.AST) -> Iterator[tuple[int, str | None, str]]:
    """(line, the name it binds, full name); `import a.b` binds a, which needs no translation: None."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.asname, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = path.removesuffix(".py").split("/")[: -node.level] if node.level else []
        origin = ".".join([*above, node.module] if node.module else above)
        yield from ((node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}") for alias in node.names)


def functions(root: Path) -> Iterator[tuple[Source, Function]]:
    return ((source, node) for source in sources(root) for node in source.nodes if isinstance(node, Function))


@cache
def uses(source: Source) -> tuple[tuple[int, str], ...]:
    """Imports and dotted names by line, calls with constants: numpy.load(_, allow_pickle=True)."""
    calls = {id(node.func): node for node in source.nodes if isinstance(node, ast.Call)}
    found = list(source.imports)
    for node in source.nodes:
        if isinstance(node, ast.expr) and (name := source.dotted(node)):
            found.append((node.lineno, name + _arguments(calls.get(id(node)))))
    return tuple(sorted(found))


def _arguments(call: ast.Call | None) -> str:
    if call is None:
        return ""
    pairs = [("", value) for value in call.args] + [(f"{word.arg}=", word.value) for word in call.keywords]
    shown = (key + (repr(value.value) if isinstance(value, ast.Constant) else "_") for key, value in pairs)
    return f"({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the package; `parents` are the package's classes it names as bases, by full name."""

    source: Source
    node: ast.ClassDef
    parents: tuple[str, ...]

    @property
    def methods(self) -> list[Function]:
        return [node for node in self.node.body if isinstance(node, Function)]


def classes(root: Path) -> dict[str, Class]:
    """Full name -> class, whichever file it is imported through."""
    modules = {source.module: source for source in sources(root)}
    named = {
        f"{source.module}.{node.name}": (source, node)
        for source in modules.values()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {}
    for name, (source, node) in named.items():
        bases = (_defined(modules, _base(source, base)) for base in node.bases)
        found[name] = Class(source, node, tuple(base for base in bases if base in named and base != name))
    return found


def _base(source: Source, base: ast.expr) -> str:
    name = source.dotted(base.value if isinstance(base, ast.Subscript) else base) or ""
    return name if "." in name else f"{source.module}.{name}"


def _defined(modules: Mapping[str, Source], name: str) -> str:
    """Follows re-exports to the module that defines the name."""
    owner, _, last = name.rpartition(".")
    onward = modules[owner].names.get(last) if owner in modules else None
    return _defined(modules, onward) if onward else name


def ancestors(name: str, known: Mapping[str, Class]) -> Iterator[str]:
    """The package's classes above this one."""
    for parent in known[name].parents:
        yield parent
        yield from ancestors(parent, known)
