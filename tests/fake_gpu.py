"""A GPU that computes on the CPU, for tests of code for devices: `cuda` tensors that refuse to be mixed with others.

Inside `fake_gpu()` torch sees one GPU. Its tensors are `FakeTensor`s around tensors on the CPU: each operator runs on
those, after a check that all of its tensors are on the same device, as a GPU would have it. Streams do everything in
order. It shows on which device each tensor is, not what kernels for GPUs compute, nor how long anything takes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

BACKEND = "fake"  # torch's own name of the device; `device` of its tensors says cuda
DEVICE = torch.device("cuda", 0)
MIXING = ("copy_", "_to_copy", "is_same_size", "set_", "detach")  # operators that take tensors of both devices
_registered = threading.Event()


class FakeTensor(torch.Tensor):
    """A tensor on the fake GPU; `host` has its numbers."""

    host: torch.Tensor
    device = property(lambda self: DEVICE)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "FakeTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(BACKEND, 0),
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor on a GPU has no array; call .cpu() first")

    def new_tensor(self, data: Any, **options: Any) -> "FakeTensor":
        return FakeTensor(self.host.new_tensor(data, **options))

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Nothing: memory is not reused before its time."""


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the host tensors, after the check of devices."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    name, on_gpu = func.__name__, any(isinstance(x, FakeTensor) for x in tensors)
    is_index = name.startswith(("index.", "index_put", "_index_put_impl", "_unsafe_index"))
    others = [x for x in tensors if not isinstance(x, FakeTensor) and x.dim()]
    if is_index and isinstance(args[0], FakeTensor):  # may be indexed from the CPU
        others = [x for x in tree_leaves(args[2:]) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
        others = [x for x in others if x.dim()]
    if on_gpu and others and not name.startswith(MIXING):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu")
    target = kwargs.get("device")
    result = func(*tree_map(_to_host, args), **tree_map(_to_host, kwargs))
    if name.startswith("copy_."):
        return args[0]
    if not (on_gpu if target is None else torch.device(target).type != "cpu"):
        return result
    known = {id(x.host): x for x in tensors if isinstance(x, FakeTensor)}  # what is written in place stays itself
    return tree_map(lambda x: known.get(id(x)) if id(x) in known else _wrap(x), result)


def _wrap(x: Any) -> Any:
    return FakeTensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and not x.is_meta else x


def _to_host(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu") if x.type in (BACKEND, "cuda") else x
    return x.host if isinstance(x, FakeTensor) else x


class _Devices(TorchFunctionMode):
    """Calls with cuda become calls with the fake device, before torch looks for CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if func in (torch.tensor, torch.as_tensor) and _rename(kwargs.get("device")) is not kwargs.get("device"):
            del kwargs["device"]
            made = func(*args, **kwargs)
            return made if isinstance(made, FakeTensor) else FakeTensor(made)
        return func(*tree_map(_rename, args), **tree_map(_rename, kwargs))


def _rename(x: Any) -> Any:
    is_device = isinstance(x, torch.device) and x.type == "cuda" or isinstance(x, str) and x.startswith("cuda")
    return torch.device(BACKEND, 0) if is_device else x


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run_backward(run: Any) -> Any:
    """The engine's backward pass with the mode, which is off inside of `backward`: hooks call torch, too."""

    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        with _Devices():
            return run(*args, **kwargs)

    return run_with_mode


class _Stream:
    """A stream, or an event: everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextmanager
def fake_gpu(gpu: str = "fake", num: int = 1) -> Iterator[None]:
    """A context in which torch sees `num` fake GPUs; `gpu` identifies this rank's among those of all ranks."""
    if not _registered.is_set():
        _setup_privateuseone_for_python_backend(BACKEND)
        module = torch.get_device_module(BACKEND)  # stays after the context, where torch asks it for random numbers
        module.get_rng_state, module.set_rng_state = torch.get_rng_state, lambda *_: None
        _registered.set()
    properties = SimpleNamespace(uuid=gpu, total_memory=1 << 34, multi_processor_count=1)
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: num,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: "fake GPU",
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (1 << 33, 1 << 34),
        "is_bf16_supported": lambda **_: False,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": lambda _: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "stream": nullcontext,
    }
    patches = [mock.patch.object(torch.cuda, name, value) for name, value in cuda.items()]
    patches += [
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),
        mock.patch("torch.autograd._engine_run_backward", _run_backward(graph._engine_run_backward)),
        mock.patch("shardwright.kernels.triton_modules._has_triton", lambda: False),
        mock.patch("shardwright.comm.staging.PINNING_DEVICES", ()),
    ]
    for patch in patches:
        patch.start()
    try:
        # Backward passes on this thread: Python code on torch's threads for devices aborts with a device in Python.
        with _Devices(), _Operators(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        for patch in reversed(patches):
            patch.stop()
