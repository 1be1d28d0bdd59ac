"""Every gate must report planted violations with file, line and remedy, and report nothing on a clean tree.

Both trees are small and written as text. In PLANTS each line that the gate must report ends with "#!" and a part of
the message; it must report no other line. CLEAN also contains the exemptions of each rule.
"""

import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gates
import pytest

CLEAN = """
shardwright/__init__.py
    from shardwright.spec.workload import Workload
    __all__ = ["Workload"]

shardwright/errors.py
    class UserError(ValueError):
        pass

shardwright/config/__init__.py
    import os
    HOME = os.environ.get("SHARDWRIGHT_HOME")

shardwright/spec/workload.py
    from dataclasses import dataclass, field
    from types import MappingProxyType
    from ..errors import UserError
    UNITS = MappingProxyType({"s": 1.0})
    NAMES = frozenset(["a"])
    @dataclass
    class Workload:
        __pydantic_config__ = {"extra": "forbid"}
        tables: list = field(default_factory=list)
        batch_size: int

shardwright/planner/search.py
    import numpy
    from shardwright.spec.workload import Workload

shardwright/comm/mesh.py
    import os
    import torch.distributed as dist
    RANK = os.environ["RANK"]
    def start(x, *, group):
        return dist.all_reduce(x, group=group, async_op=True)  # TODO(#12): hierarchical, TODO(v0.2): bf16

shardwright/kernels/embedding.py
    import torch
    import triton
    @triton.jit
    def _kernel(a, b, c, d, e, f, g, h, i, j): ...
    def _update(a, b, c, d, e, f, g, h, i): ...
    @torch.library.register_fake("tiny::lookup")
    def _lookup(a, b, c, d, e, f, g, h, i): ...
    operators = torch.library.Library("tiny", "DEF")
    operators.impl("update", _update, "CPU")

shardwright/layers/__init__.py
    from .gates import Noisy

shardwright/layers/gates.py
    from abc import abstractmethod
    from torch import nn
    class Gate(nn.Module):
        @abstractmethod
        def choose(self, x):
            return None
        def score(self, x):
            raise NotImplementedError
        def forward(self, a, b, c, d, e, f, g, h):
            return a
    class Noisy(Gate):
        def choose(self, x):
            return []
        def score(self, x):
            return 0

shardwright/data/loading/loader.py
    import multiprocessing
    import numpy as np
    from torch.utils.data import DataLoader
    def read(path):
        spawned = multiprocessing.get_context("spawn")
        DataLoader(path, num_workers=2, multiprocessing_context=spawned)
        return spawned.Process(target=np.load, args=(np.load(path, allow_pickle=False),))

shardwright/runtime/build.py
    import torch
    from shardwright.planner import search
    from shardwright.spec import workload
    def wait():
        torch.cuda.current_stream().synchronize()

csrc/dedup.cpp
    int main() { return 0; }
"""

PLANTS = """
stage communication: shardwright/dense/a.py
    from functools import partial
    from shardwright.comm import collective as c, point_to_point
    from shardwright.comm.collective import broadcast
    def start(x, group) -> Pending:
        pending = c.all_reduce(x, group)
        pending.wait()  #! waits for pending outside of slots
        return pending.then(lambda y: y + pending.wait())
    class A:
        @accesses(reads=("x",), writes=("sum",))
        def add(self, slots):
            slots.issue("sum", c.all_reduce_bf16(slots["x"], self.group))
        def hook(self, x):
            self.saver.wait()
            y = c.all_reduce(x, self.group)  #! issues shardwright.comm.collective.all_reduce outside of a stage
            return y.wait()  #! waits for y outside of slots
        later = partial(c.all_reduce, 1)
    point_to_point.send(1)  #! issues shardwright.comm.point_to_point.send
    broadcast(1)  #! issues shardwright.comm.collective.broadcast

layered: shardwright/stray/a.py
    x = 1  #! "stray" has no layer

import direction: shardwright/spec/a.py
    import shardwright.errors
    import shardwright.runtime.build  #! spec imports shardwright.runtime.build, which is in a higher layer

import direction: shardwright/kernels/a.py
    def f():
        from ..comm import mesh  #! kernels imports shardwright.comm.mesh, which is in the same layer

import direction: shardwright/models/a.py
    from shardwright import Workload  #! models imports shardwright.Workload from the root
    import shardwright  #! models imports shardwright from the root

import direction: shardwright/errors.py
    from . import spec  #! errors imports shardwright.spec, which is in a higher layer

planner importers: shardwright/layers/a.py
    import shardwright.planner.price.primitives  #! uses shardwright.planner.price.primitives

planner importers: shardwright/data/a.py
    from ..planner import search  #! uses shardwright.planner.search
    search.find_best()

torch-free: shardwright/spec/a.py
    def f():
        import torch  #! uses torch

torch-free: shardwright/planner/a.py
    from torch.nn import Linear  #! uses torch.nn.Linear

collectives: shardwright/dense/a.py
    import torch
    torch.distributed.all_reduce(1)  #! uses torch.distributed.all_reduce(1)
    torch.distributed.get_rank()

collectives: shardwright/dense/a.py
    from torch import distributed as d
    d.all_to_all_single(x)  #! all_to_all_single
    d.reduce_scatter_tensor(x)  #! reduce_scatter_tensor
    start = d.isend  #! isend
    group = d.new_group([0])  #! new_group

collectives: shardwright/runtime/a.py
    from torch.distributed import ReduceOp, barrier as meet  #! uses torch.distributed.barrier
    from torch.distributed.device_mesh import init_device_mesh  #! init_device_mesh
    import torch.distributed.nn  #! uses torch.distributed.nn

streams: shardwright/runtime/a.py
    import torch
    with torch.cuda.stream(torch.cuda.current_stream()):  #! uses torch.cuda.stream(_)
        torch.cuda.Stream()  #! uses torch.cuda.Stream()

streams: shardwright/data/a.py
    from torch import Stream  #! uses torch.Stream

environment: shardwright/runtime/a.py
    from os import environ as e, path  #! uses os.environ
    x = e["A"]

environment: shardwright/cli.py
    import os
    os.getenv("A")  #! uses os.getenv('A')
    os.environ["A"]  #! uses os.environ

fork: shardwright/data/a.py
    import os, torch
    import multiprocessing as m
    os.fork()  #! uses os.fork()
    m.get_context()  #! get_context()
    m.get_context("fork").Process()
    torch.multiprocessing.set_start_method("fork")  #! set_start_method('fork')
    torch.multiprocessing.start_processes(f, start_method="fork")  #! start_processes(_, start_method='fork')

fork: shardwright/data/a.py
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import Pool, Process
    from torch.utils.data import DataLoader
    Process(target=f)  #! uses multiprocessing.Process(target=_)
    Pool(2)  #! uses multiprocessing.Pool(2)
    ProcessPoolExecutor(2)  #! uses concurrent.futures.ProcessPoolExecutor(2)
    DataLoader(x, num_workers=2)  #! uses torch.utils.data.DataLoader(_, num_workers=2)

pickle: shardwright/checkpoint/a.py
    import pickle  #! uses pickle
    import joblib as j  #! uses joblib
    import torch
    pickle.load(f)
    torch.load(f, weights_only=True)  #! uses torch.load(_, weights_only=True)

pickle: shardwright/data/a.py
    import numpy as np
    from torch import save  #! uses torch.save
    np.load(f, mmap_mode="r")
    np.load(f, allow_pickle=True)  #! uses numpy.load(_, allow_pickle=True)

pickle: shardwright/comm/a.py
    import torch.distributed as dist
    dist.all_gather_object(x, y)  #! uses torch.distributed.all_gather_object
    dist.broadcast_object_list(x)  #! uses torch.distributed.broadcast_object_list
    from torch.distributed.launcher.api import elastic_launch  #! uses torch.distributed.launcher
    dist.all_gather(x, y)

parameters: shardwright/report/a.py
    class A:
        def f(self, a, b, c, d, e, f, g, h): ...
        def g(self, a, b, c, d, e, *f, g, h, **i): ...  #! g takes 9 parameters, limit 8

parameters: shardwright/report/a.py
    def f(a, b, c, d, e, pair: tuple[int, str], triple: tuple[int, ...]): ...
    def g(a, b, c, d, e, f, g, pair: tuple[int, str] | None): ...  #! g takes 9 parameters, limit 8

argument dicts: shardwright/report/a.py
    def f(**given):
        more = {"a": 1}
        return g(**given, **{"b": 2}, **more)  #! f passes the dict more as arguments

bare names: shardwright/report/a.py
    class A:
        def told(self): ...  #! the function name "told" says nothing
    def _joined(x): ...  #! the function name "_joined" says nothing
    def concat(x): ...

class names: shardwright/report/a.py
    class Noisy: ...  #! class Noisy is also in shardwright/layers/gates.py
    class _Gate: ...

shape legends: shardwright/report/a.py
    LIMIT_BD = 3
    def f(x_BD): ...  #! x_BD: no legend for B, D

todo: shardwright/report/a.py
    x = 1  # TODO later #! TODO without an issue
    y = 1  # XXX #! XXX without an issue

todo: csrc/a.cpp
    // FIXME(me): slow #! FIXME without an issue

file names: shardwright/report/utils.py
    x = 1  #! the name "utils" says nothing

file names: shardwright/report/core/a.py
    x = 1  #! the name "core" says nothing

file names: shardwright/report/page_part2.py
    x = 1  #! the name "page_part2" says nothing

class depth: shardwright/models/a.py
    class A: ...
    class B(A): ...
    class C(B): ...  #! class C has inheritance depth 3, limit 2

class depth: shardwright/models/a.py
    from ..layers import gates
    class D(gates.Noisy[int]): ...  #! class D has inheritance depth 3, limit 2
    from .. import layers as outer
    class E(outer.Noisy): ...  #! class E has inheritance depth 3, limit 2

overriding: shardwright/models/a.py
    from ..layers.gates import Gate as G
    class D(G):
        def choose(self, x): ...
        def forward(self): ...  #! D.forward overrides a concrete method of shardwright.layers.gates.Gate

mutable state: shardwright/report/a.py
    from collections import defaultdict as d
    x = y = []  #! x, y is mutable module state
    if x:
        z: dict = {}  #! z is mutable module state
    w = (1, [i for i in z])  #! w is mutable module state
    v = d(int)  #! v is mutable module state

mutable state: shardwright/report/a.py
    class A:
        seen = set()  #! seen is mutable module state
        def f(self):
            global x  #! global x
            x = []
"""

REMEDIES = {
    "layered": "LAYERS of tests/gates.py",
    "import direction": "move what both need into a lower layer",
    "planner importers": "accept a Plan",
    "torch-free": "describe a tensor by its numbers",
    "collectives": "call comm with the Mesh",
    "streams": "give the Stage a lane",
    "environment": "add a key to the recipe",
    "fork": "multiprocessing.get_context('spawn')",
    "pickle": "use safetensors",
    "file length": "into its own file, named after a noun",
    "function length": "split it into its phases",
    "function tail": "shorten the longest functions",
    "parameters": "a frozen dataclass",
    "argument dicts": "write the arguments in the call",
    "bare names": "use a verb",
    "class names": "so that a search finds a single class",
    "shape legends": "Shape legend: B samples",
    "todo": "TODO(#12)",
    "file names": "name it after what it contains",
    "class depth": "do not subclass to make a choice",
    "overriding": "make that method abstract",
    "mutable state": "tuple, frozenset or MappingProxyType",
    "stage communication": "add it to BLOCKING",
    "line budget": "raise its budget",
}
BUDGETS = dict.fromkeys(
    (".", "config", "spec", "planner", "comm", "kernels", "layers", "data", "runtime", "report"), 99
)
GATES = {**gates.GATES, "line budget": partial(gates.line_budget, budgets=BUDGETS)}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(heading, content) of each paragraph."""
    for paragraph in text.strip().split("\n\n"):
        heading, _, content = paragraph.partition("\n")
        yield heading, textwrap.dedent(content) + "\n"


def planted_violations() -> Iterator[tuple[str, str, str]]:
    """(gate, path, content) of PLANTS, and of violations that are too long to write out there."""
    for heading, content in blocks(PLANTS):
        gate, path = heading.split(": ")
        yield gate, path, content
    yield (
        "file length",
        "shardwright/report/a.py",
        "\n" * 400 + "x = 1  #! the file has 401 lines, limit 400\n",
    )
    yield "file length", "csrc/a.h", "\n" * 400 + "int x; #! the file has 401 lines, limit 400\n"
    yield "line budget", "shardwright/report/a.py", "x = 1  #! 200 of them here\n" + "\n" * 199
    body = "    x = 1\n" * 80
    yield (
        "function length",
        "shardwright/report/a.py",
        f"def f():  #! f has 81 lines, limit 80\n{body}def g(): ...\n",
    )
    yield (
        "function tail",
        "shardwright/report/a.py",
        f"def f():\n{body}def g():  #! 81 lines, limit 40\n{body}",
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, content in blocks(CLEAN):
        write(tmp_path / path, content)
    return tmp_path


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize("gate", GATES)
def test_clean_tree_passes(tree: Path, gate: str) -> None:
    assert GATES[gate](tree) == []


@pytest.mark.parametrize(("gate", "path", "content"), tuple(planted_violations()))
def test_planted_violation_is_reported(tree: Path, gate: str, path: str, content: str) -> None:
    write(tree / path, content)
    violations = GATES[gate](tree)
    lines = enumerate(content.splitlines(), start=1)
    marks = {f"{path}:{number}: ": line.split("#! ")[1] for number, line in lines if "#! " in line}
    assert len(violations) == len(marks), violations
    for location, message in marks.items():
        violation = next(violation for violation in violations if violation.startswith(location))
        assert message in violation
        assert REMEDIES[gate] in violation.rpartition("; ")[2]


def test_every_gate_has_a_planted_violation_and_a_remedy() -> None:
    assert {gate for gate, _, _ in planted_violations()} == set(GATES) == set(REMEDIES)


def test_a_directory_without_the_package_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no Python files"):
        gates.todo(tmp_path)
