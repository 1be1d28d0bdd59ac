"""Architecture gates: each takes the repository root and lists the lines that break its rule, with the remedy.

A gate yields (path, line, what is wrong) and has one remedy. Limits and lists are the constants in capitals;
to add a ban, add a row to BANS. Gates change no files. Their only exemptions are the paths that a ban allows.
"""

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType

from sources import PACKAGE, Function, Source, ancestors, classes, functions, sources, uses

# From top to bottom: a part may import lower layers, never its own. The import-linter contract in pyproject agrees.
LAYERS = (
    ("cli",),
    ("check_scheme",),
    ("report", "lab", "serving"),
    ("runtime",),
    ("measure", "embeddings", "experts", "dense", "checkpoint", "models", "data"),
    ("layers", "step"),
    ("kernels", "comm", "planner"),
    ("config", "jagged", "library", "parameter_shard", "rectangle", "spec"),
    ("errors",),
)
UNLAYERED = ("__init__", "__main__", "recipes", "clusters")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_FUNCTION_P90 = 40
MAX_PARAMETERS = 8
MAX_CLASS_DEPTH = 2
BANNED_FILE_NAME = r"utils|common|helpers|misc|core|base|manager|factory|types|legacy|v2|.*_part_?\d+"
TODO_WITHOUT_ISSUE = r"\b(TODO|FIXME|XXX)\b(?!\((#\d+|v\d[\d.]*)\))"
BARE_NAMES = frozenset((Path(__file__).parent / "bare_names.txt").read_text().split())
SHAPED_NAME = re.compile(r"_?[a-z]\w*_([A-Z]{1,5})")
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
MUTABLE_CALL = (
    r"list|dict|set|bytearray|array\.array|itertools\.count|threading\.local|weakref\.Weak\w+(Dictionary|Set)"
    r"|collections\.(defaultdict|deque|Counter|OrderedDict|ChainMap)"
)
COLLECTIVE = re.compile(
    r"shardwright\.comm\.(collective|flat_collectives|point_to_point|hierarchical)\."
    r"(\w*all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|many_to_one|send|receive)(_\w+)?"
)
NOT_PENDING = re.compile(r"self|process|(.*\.)?_?\w*(saver|publisher|writer)s?(\[.*\])?")  # whose `wait` is another
# Functions that issue or wait outside of slots; an empty tuple stands for all functions of the file.
BLOCKING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Set-up, agreement, checkpoints, and lookups outside of a step.
        "dense/flat_parameter.py": ("__init__", "all_gather_tensors"),
        "dense/replicated.py": ("broadcast_values",),
        "embeddings/copies/bounded_tables.py": ("find_rows", "flush"),  # outside of a step
        "embeddings/exchange.py": ("route", "pool", "lookup"),
        "embeddings/host_tables.py": ("lookup", "cache_counts"),
        "embeddings/row_placer.py": ("wait_until_placed",),  # of counts, for reports
        "embeddings/row_threads.py": ("run_alone",),  # of tables as a whole, between steps
        "embeddings/full_tables.py": ("gather_state", "_gather_by_id"),
        "embeddings/service/remote_rows.py": (),  # state on servers, between steps
        "embeddings/service/server_store.py": (),  # in the thread that copies rows, and before the first step
        "embeddings/service/served_tables.py": ("find_rows", "open", "flush", "_confirm"),  # the last: of earlier calls
        "runtime/agreement.py": (),
        "runtime/bindings.py": ("wait_for_end",),
        "runtime/rank_group.py": (),
        "runtime/run/started_servers.py": (),  # for processes
        # Inside one stage, whose event includes the wait: "ids" (sizes of id weights), "update", and "step".
        "dense/clip_grad_norm.py": (),
        "runtime/batch_norms.py": (),  # in "forward" and "backward"
        "embeddings/update.py": ("_gradient_sums", "_gather_replicas", "_finish_column_shards"),
        "embeddings/used_features.py": ("restrict", "_exchange_masks"),
        "embeddings/vector_transport.py": ("exchange_id_weights",),
    }
)
READ_BY_LIBRARIES = ("__all__", "__pydantic_config__")

Finding = tuple[str, int, str]
Gate = Callable[[Path], list[str]]


def gate(remedy: str) -> Callable[[Callable[..., Iterable[Finding]]], Callable[..., list[str]]]:
    """Decorator: turns a function that yields findings into one that returns them as lines, with the remedy."""

    def decorate(find: Callable[..., Iterable[Finding]]) -> Callable[..., list[str]]:
        @wraps(find)
        def check(root: Path, **settings: object) -> list[str]:
            return [f"{path}:{line}: {problem}; {remedy}" for path, line, problem in find(root, **settings)]

        return check

    return decorate


@gate("move it into a part of the package, or add it to LAYERS of tests/gates.py and to pyproject's contract")
def layered(root: Path) -> Iterator[Finding]:
    for source in sources(root):
        if (part := _part(source.module)) not in (*_depths(), *UNLAYERED):
            yield source.path, 1, f'"{part}" has no layer'


@gate("move what both need into a lower layer, or let runtime/build pass it as an argument")
def import_direction(root: Path) -> Iterator[Finding]:
    depths = _depths()
    for source in sources(root):
        part = _part(source.module)
        for line, target in source.imports if part in depths else ():
            imported = _part(target)
            if target.split(".")[0] != PACKAGE or imported in (part, "__version__"):
                continue
            if imported not in depths:
                yield source.path, line, f"{part} imports {target} from the root"
            elif depths[imported] <= depths[part]:
                layer = "a higher" if depths[imported] < depths[part] else "the same"
                yield source.path, line, f"{part} imports {target}, which is in {layer} layer"


def _depths() -> dict[str, int]:
    return {part: depth for depth, layer in enumerate(LAYERS) for part in layer}


def _part(module: str) -> str:
    return [*module.split("."), "__init__"][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Patterns of uses (see `sources.uses`) that are banned in paths `inside`, except in paths `allowed`."""

    names: tuple[str, ...]
    inside: tuple[str, ...] = ("",)
    allowed: tuple[str, ...] = ()
    remedy: str


BANS = MappingProxyType(
    {
        "planner importers": Ban(
            names=(r"shardwright\.planner\b",),
            allowed=("planner/", "runtime/", "report/", "lab/", "cli.py", "check_scheme.py"),
            remedy="decisions stay in planner/: accept a Plan, or a function that runtime/build passes",
        ),
        "torch-free": Ban(
            names=(r"torch\b",),
            inside=("spec/", "planner/"),
            remedy="spec and planner do not use torch: describe a tensor by its numbers (rows, dim, bytes)",
        ),
        "collectives": Ban(
            names=(
                r"torch\.distributed\.(distributed_c10d\.)?(all_reduce|all_gather|all_to_all|reduce|gather|scatter"
                r"|broadcast|send|recv|isend|irecv|batch_isend_irecv|barrier|monitored_barrier)(_\w+)?\b",
                r"torch\.distributed\.(\w+\.)?(new_group|new_subgroups|init_process_group|init_device_mesh)\b",
                r"torch\.distributed\.(_functional_collectives|nn)\b",
                r"torch\.ops\._?c10d\w*",
            ),
            allowed=("comm/",),
            remedy="only comm/ issues collectives and makes groups: call comm with the Mesh you are given",
        ),
        "streams": Ban(
            names=(r"torch\.(cuda\.)?(Stream|ExternalStream|StreamContext|stream|set_stream)\b",),
            allowed=("comm/",),
            remedy="only comm/ makes and enters streams: give the Stage a lane",
        ),
        "environment": Ban(
            names=(r"os\.(environb?|getenvb?|putenv|unsetenv)\b",),
            allowed=("config/__init__.py", "comm/mesh.py", "runtime/launch/launcher.py"),  # ranks and addresses
            remedy="environment variables must not change results: add a key to the recipe, read in config/",
        ),
        "fork": Ban(
            names=(
                r"os\.fork\w*",
                r"pty\.fork",
                r"(torch\.)?multiprocessing\.(\w+\.)?(Process|Pool|Queue|SimpleQueue|JoinableQueue|Manager)\(",
                r"(torch\.)?multiprocessing\.(get_context|set_start_method)\((?!(method=)?'spawn')",
                r".*\bstart_method='fork",
                r"concurrent\.futures\.(\w+\.)?ProcessPoolExecutor\((?!.*mp_context=)",
                r"torch\.utils\.data\.DataLoader\((?=.*num_workers=(?!0\b))(?!.*multiprocessing_context=)",
            ),
            allowed=("embeddings/service/journal.py",),  # its child writes the rows as they were, without torch
            remedy="a fork hangs after an OpenMP region: use multiprocessing.get_context('spawn')",
        ),
        "pickle": Ban(
            names=(
                r"(_?pickle|cloudpickle|dill|marshal|shelve|joblib)\b",
                r"torch\.(load|save|serialization|distributed\.checkpoint)\b",
                r"numpy\.load\(.*allow_pickle=(?!False)",
                r"pandas\.read_pickle\b",
                r"torch\.distributed\.(distributed_c10d\.)?\w+_object(_list)?\b",
                r"torch\.distributed\.(elastic|launcher)\b",  # its rendezvous unpickles keys that any client may set
            ),
            remedy="unpickling runs code: use safetensors with our manifest, JSON (ranks: comm.messages), TOML or .npy",
        ),
    }
)


def banned(root: Path, ban: Ban) -> list[str]:
    """The first use of each banned name in each file."""
    pattern = re.compile("|".join(ban.names))
    first_uses: dict[tuple[str, str], str] = {}
    for source in sources(root):
        if source.inner_path.startswith(ban.inside) and not source.inner_path.startswith(ban.allowed):
            for line, use in uses(source):
                if match := pattern.match(use):
                    text = f"{source.path}:{line}: uses {use}; {ban.remedy}"
                    first_uses.setdefault((source.path, match[0]), text)
    return list(first_uses.values())


@gate("move a part of it into its own file, named after a noun, or remove code")
def file_length(root: Path) -> Iterator[Finding]:
    for source in sources(root, native=True):
        if (count := len(source.lines)) > MAX_FILE_LINES:
            yield source.path, MAX_FILE_LINES + 1, f"the file has {count} lines, limit {MAX_FILE_LINES}"


@gate("remove lines, or raise its budget in tests/packages.toml and give the reason in the commit message")
def line_budget(root: Path, *, budgets: Mapping[str, int]) -> Iterator[Finding]:
    longest: dict[str, tuple[int, str]] = {}
    totals: dict[str, int] = {}
    for source in sources(root):
        package = source.inner_path.partition("/")[0] if "/" in source.inner_path else "."
        totals[package] = totals.get(package, 0) + len(source.lines)
        longest[package] = max(longest.get(package, (0, "")), (len(source.lines), source.path))
    for package, total in totals.items():
        if total > budgets.get(package, 0):
            count, path = longest[package]
            problem = f'"{package}" has {total} lines, budget {budgets.get(package, 0)}, {count} of them here'
            yield path, 1, problem


@gate("split it into its phases, each a function named after what it does")
def function_length(root: Path) -> Iterator[Finding]:
    for source, function in functions(root):
        if (count := _num_lines(function)) > MAX_FUNCTION_LINES:
            yield source.path, function.lineno, f"{function.name} has {count} lines, limit {MAX_FUNCTION_LINES}"


@gate("shorten the longest functions, this one first")
def function_tail(root: Path) -> Iterator[Finding]:
    ranked = sorted((_num_lines(node), source.path, node.lineno, node.name) for source, node in functions(root))
    p90 = ranked[math.ceil(0.9 * len(ranked)) - 1][0] if ranked else 0
    if p90 > MAX_FUNCTION_P90:
        count, path, line, name = ranked[-1]
        problem = f"the 90th percentile of function lengths is {p90} lines, limit {MAX_FUNCTION_P90}"
        yield path, line, f"{problem}; {name} has {count}"


def _num_lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@gate("group parameters that belong together in a frozen dataclass, or split the function")
def parameters(root: Path) -> Iterator[Finding]:
    for source, function in functions(root):
        count = _num_parameters(function)
        if count > MAX_PARAMETERS and not _is_operator(source, function):
            yield source.path, function.lineno, f"{function.name} takes {count} parameters, limit {MAX_PARAMETERS}"


def _num_parameters(function: Function) -> int:
    """A parameter annotated as a tuple of different types counts once per type."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    has_receiver = bool(parameters) and parameters[0].arg in ("self", "cls", "ctx")
    num = sum(map(_num_values, parameters)) - has_receiver
    return num + bool(arguments.vararg) + bool(arguments.kwarg)


def _num_values(argument: ast.arg) -> int:
    for node in ast.walk(argument.annotation) if argument.annotation else ():
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple" and isinstance(node.slice, ast.Tuple):
            elements = [ast.unparse(element) for element in node.slice.elts]
            return len(elements) if len({*elements}) > 1 and "..." not in elements else 1
    return 1


@gate("write the arguments in the call, or pass them as one value")
def argument_dicts(root: Path) -> Iterator[Finding]:
    """A local dict that is unpacked as arguments of a call hides their number and types."""
    for source, function in functions(root):
        local_dicts = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                value = keyword.value if keyword.arg is None else None
                if isinstance(value, ast.Name) and value.id in local_dicts:
                    yield source.path, node.lineno, f"{function.name} passes the dict {value.id} as arguments"


@gate("use a verb, or a noun phrase for what it returns")
def bare_names(root: Path) -> Iterator[Finding]:
    """Methods of the public API, also inherited ones, are exempt: users call them."""
    public = _public_methods(root)
    for source, function in functions(root):
        if function.name.strip("_") in BARE_NAMES and id(function) not in public:
            yield source.path, function.lineno, f'the function name "{function.name}" says nothing'


def _public_methods(root: Path) -> set[int]:
    api = next(source for source in sources(root) if source.module == PACKAGE)
    exported = {node.value for node in api.nodes if isinstance(node, ast.Constant)}
    by_name = classes(root)
    public = {name for name, cls in by_name.items() if cls.node.name in exported}
    public |= {ancestor for name in public for ancestor in ancestors(name, by_name)}
    return {id(method) for name in public for method in by_name[name].methods if not method.name.startswith("_")}


@gate("rename one of them, so that a search finds a single class")
def class_names(root: Path) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for source in sources(root):
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if node.name in seen:
                    yield source.path, node.lineno, f"class {node.name} is also in {seen[node.name]}"
                seen.setdefault(node.name, source.path)


@gate('explain each letter in the module docstring: "Shape legend: B samples, D columns."')
def shape_legends(root: Path) -> Iterator[Finding]:
    for source in sources(root):
        docstring = ast.get_docstring(source.nodes[0]) or ""  # pyright: ignore[reportArgumentType]
        legend = set(re.findall(r"\b[A-Z]\b", docstring.partition("Shape legend:")[2]))
        for node in source.nodes:
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            if (match := SHAPED_NAME.fullmatch(name)) and (missing := {*match[1]} - legend):
                yield source.path, node.lineno, f"{name}: no legend for {', '.join(sorted(missing))}"
                break


def _is_operator(source: Source, function: Function) -> bool:
    """Whether it is a Triton kernel, or registered with torch.library by decorator or library.impl(_, function, _)."""
    decorators = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    if any((source.dotted(node) or "").startswith(("triton.", "torch.library.")) for node in decorators):
        return True
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("impl", "register_fake", "_register_fake")
        and function.name in map(ast.unparse, call.args)
        for call in source.nodes
    )


@gate("do it now, or open an issue and give its number: TODO(#12)")
def todo(root: Path) -> Iterator[Finding]:
    for source in sources(root, native=True):
        for line, text in enumerate(source.lines, start=1):
            if match := re.search(TODO_WITHOUT_ISSUE, text):
                yield source.path, line, f"{match[0]} without an issue or version"


@gate("name it after what it contains")
def file_names(root: Path) -> Iterator[Finding]:
    for source in sources(root, native=True):
        for name in Path(source.path).with_suffix("").parts:
            if re.fullmatch(BANNED_FILE_NAME, name):
                yield source.path, 1, f'the name "{name}" says nothing'


@gate("do not subclass to make a choice: pass the difference as data or as a function")
def class_depth(root: Path) -> Iterator[Finding]:
    by_name = classes(root)

    def depth(name: str) -> int:
        return 1 + max(map(depth, by_name[name].parents), default=0)

    for name, cls in by_name.items():
        if depth(name) > MAX_CLASS_DEPTH:
            problem = f"class {cls.node.name} has inheritance depth {depth(name)}, limit {MAX_CLASS_DEPTH}"
            yield cls.source.path, cls.node.lineno, problem


@gate("classes are abstract or final: make that method abstract, or use composition")
def overriding(root: Path) -> Iterator[Finding]:
    by_name = classes(root)
    for name, cls in by_name.items():
        for method in cls.methods:
            for ancestor in ancestors(name, by_name):
                overridden = (other for other in by_name[ancestor].methods if other.name == method.name)
                if not all(map(_is_abstract, overridden)):
                    problem = f"{cls.node.name}.{method.name} overrides a concrete method of {ancestor}"
                    yield cls.source.path, method.lineno, problem


def _is_abstract(method: Function) -> bool:
    """Whether it is decorated as abstract, or has only a docstring, `...` and raise NotImplementedError."""
    is_decorated = any("abstractmethod" in ast.unparse(decorator) for decorator in method.decorator_list)
    return is_decorated or all(
        (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement))
        for statement in method.body
    )


@gate("make it a tuple, frozenset or MappingProxyType, or keep it in an object that is passed as an argument")
def mutable_state(root: Path) -> Iterator[Finding]:
    for source in sources(root):
        for node in source.nodes:
            if isinstance(node, ast.Global):
                yield source.path, node.lineno, f"global {', '.join(node.names)}: mutable module state"
        for node in _outside_functions(source.nodes[0]):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and _is_mutable(source, node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [ast.unparse(target) for target in targets]
                if not set(names) <= set(READ_BY_LIBRARIES):
                    yield source.path, node.lineno, f"{', '.join(names)} is mutable module state"


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from _outside_functions(child)


@gate(
    "return the Pending to a function of a stage, which sets a slot to it (Slots.issue, issues), or add it to BLOCKING"
)
def stage_communication(root: Path) -> Iterator[Finding]:
    """In a step, functions of stages issue collectives; who reads a slot waits.

    A function that returns a Pending issues for the stage that calls it; what it waits for in a nested function runs
    when its result is waited for.
    """
    for source in sources(root):
        if source.inner_path.startswith(("dense/", "embeddings/", "runtime/")):
            for call, outer in _calls(source.nodes[0], ()):
                if use := _communication(source, call):
                    depth = next((i for i, node in enumerate(outer, start=1) if _returns_pending(node)), 0)
                    if depth and ("waits" not in use or depth < len(outer)):
                        continue
                    if not any(_may_block(source, node) for node in outer):
                        yield source.path, call.lineno, use


def _calls(node: ast.AST, outer: tuple[ast.AST, ...]) -> Iterator[tuple[ast.Call, tuple[ast.AST, ...]]]:
    """Each call, and the functions around it from the outermost."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, outer
        yield from _calls(child, (*outer, child) if isinstance(child, Function | ast.Lambda) else outer)


def _communication(source: Source, call: ast.Call) -> str:
    if COLLECTIVE.fullmatch(name := source.dotted(call.func) or ""):
        return f"issues {name} outside of a stage"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "wait" and not call.args:
        receiver = ast.unparse(call.func.value)
        return "" if NOT_PENDING.fullmatch(receiver) else f"waits for {receiver} outside of slots"
    return ""


def _returns_pending(node: ast.AST) -> bool:
    return isinstance(node, Function) and node.returns is not None and "Pending" in ast.unparse(node.returns)


def _may_block(source: Source, node: ast.AST) -> bool:
    """Whether it is the function of a stage, or may block."""
    if not isinstance(node, Function):
        return False
    is_stage = any("accesses(" in ast.unparse(decorator) for decorator in node.decorator_list)
    blocking = BLOCKING.get(source.inner_path)
    return is_stage or (blocking is not None and (not blocking or node.name in blocking))


def _is_mutable(source: Source, value: ast.AST | None) -> bool:
    if isinstance(value, ast.Tuple | ast.BinOp | ast.IfExp | ast.BoolOp):
        return any(_is_mutable(source, part) for part in ast.iter_child_nodes(value))
    if isinstance(value, ast.Call):
        return bool(re.fullmatch(MUTABLE_CALL, source.dotted(value.func) or ""))
    return isinstance(value, MUTABLE_DISPLAYS)


GATES: Mapping[str, Gate] = MappingProxyType(
    {
        "layered": layered,
        "import direction": import_direction,
        **{name: partial(banned, ban=ban) for name, ban in BANS.items()},
        "file length": file_length,
        "function length": function_length,
        "function tail": function_tail,
        "parameters": parameters,
        "argument dicts": argument_dicts,
        "bare names": bare_names,
        "class names": class_names,
        "shape legends": shape_legends,
        "todo": todo,
        "file names": file_names,
        "class depth": class_depth,
        "overriding": overriding,
        "mutable state": mutable_state,
        "stage communication": stage_communication,
    }
)
