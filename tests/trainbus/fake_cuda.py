"""A machine of several GPUs that computes on the CPU, and records which device each call of a process touches.

Tensors carry the device that they were put on; operations pass it on, and refuse tensors of two devices, as CUDA does.
As in CUDA, each thread has a current device of its own, which begins as device 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Collectives on tensors, and on objects, which travel through the current device unless one is named.
COLLECTIVES = ("all_reduce", "broadcast", "gather", "all_gather_into_tensor")
OBJECT_COLLECTIVES = (
    "broadcast_object_list",
    "gather_object",
    "all_gather_object",
    "send_object_list",
    "recv_object_list",
)


class Touch(NamedTuple):
    """One use of a device."""

    what: str
    device: int
    thread: str


class FakeCuda:
    """The GPUs of a process. ``install`` is for the rest of the process's life."""

    def __init__(self, count: int, board: int = 0) -> None:
        """``board``: the number of the first GPU on the machine; of a slice, that of the GPU that it is cut from."""
        self.count, self._board = count, board
        self.backend = "nccl"
        self.touches: list[Touch] = []
        self._current = threading.local()
        #: Set when the communicator was aborted.
        self.aborted = threading.Event()

    @property
    def current(self) -> int:
        return getattr(self._current, "device", 0)

    def touch(self, what: str, device: Any = None) -> int:
        """Record a use of a device, the thread's current one unless it is named; return its index."""
        index = self.index_of(device)
        assert 0 <= index < self.count, f"{what}: invalid device ordinal {index}, there are {self.count}"
        self.touches.append(Touch(what, index, threading.current_thread().name))
        return index

    def index_of(self, device: Any) -> int:
        if device is None:
            return self.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current if index is None else index

    def set_device(self, device: Any) -> None:
        self._current.device = self.touch("set_device", device)

    @contextmanager
    def on_stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Make a stream, and the device that it belongs to, the current ones."""
        if stream is None:
            yield
            return
        before = self.current
        self._current.device = self.touch("stream", stream.device)
        try:
            yield
        finally:
            self._current.device = before

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before = self.current
        self._current.device = self.touch("device", device)
        try:
            yield
        finally:
            self._current.device = before

    def install(self) -> None:
        """Take the place of CUDA and NCCL in this process, in every thread that starts from now on, and in this one."""
        for name, value in self._cuda().items():
            patch.object(torch.cuda, name, value).start()
        patch.object(torch._C, "_cuda_getDriverVersion", lambda: 12080, create=True).start()
        patch.object(torch.cuda.tunable, "is_enabled", lambda: False).start()
        patch.object(torch.cuda.tunable, "tuning_is_enabled", lambda: False).start()
        patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 0)).start()
        record_stream = lambda tensor, stream: self.touch("record_stream", label_of(tensor))  # noqa: E731
        patch.object(torch.Tensor, "record_stream", record_stream).start()
        for name in COLLECTIVES:
            patch.object(dist, name, self._collective(name, getattr(dist, name))).start()
        for name in OBJECT_COLLECTIVES:
            patch.object(dist, name, self._object_collective(name, getattr(dist, name))).start()
        patch.object(dist, "batch_isend_irecv", self._batch).start()
        patch.object(dist, "init_process_group", self._init_process_group(dist.init_process_group)).start()
        patch.object(dist, "get_backend", lambda group=None: self.backend).start()
        patch.object(dist.ProcessGroup, "abort", lambda group: self.abort()).start()
        self._install_mode()

    def _install_mode(self) -> None:
        run = threading.Thread.run

        def run_with_mode(thread: threading.Thread) -> None:
            with LabelMode(self):
                run(thread)

        patch.object(threading.Thread, "run", run_with_mode).start()
        # A mode is off while it handles a call; the hooks of a backward pass are the program's again.
        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward_with_mode(*args: Any, **kwargs: Any) -> Any:
            with LabelMode(self):
                return run_backward(*args, **kwargs)

        patch.object(torch.autograd, "_engine_run_backward", run_backward_with_mode).start()
        LabelMode(self).__enter__()

    def _cuda(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "device_count": lambda: self.count,
            "is_current_stream_capturing": lambda: False,
            "device": self.on_device,
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "Stream": lambda device=None, **_: FakeStream(self, self.touch("Stream", device)),
            "Event": lambda **_: FakeEvent(self),
            "stream": self.on_stream,
            "current_stream": lambda device=None: FakeStream(self, self.touch("current_stream", device)),
            "synchronize": lambda device=None: self.touch("synchronize", device),
            "manual_seed_all": lambda seed: None,
            "set_per_process_memory_fraction": lambda part, device=None: self.touch("memory_fraction", device),
            "get_device_name": lambda device=None: f"Fake GPU {self.touch('name', device) * 0}",
            "get_device_capability": lambda device=None: (9, self.touch("capability", device) * 0),
            "get_device_properties": lambda device=None: FakeProperties(self._board + self.touch("properties", device)),
        }

    def _init_process_group(self, init: Callable[..., None]) -> Callable[..., None]:
        def init_process_group(backend: str, *, device_id: torch.device | None, **kwargs: Any) -> None:
            self.backend = backend
            self.touch("init_process_group", device_id)
            self.touch(f"communicator of {backend}")  # NCCL makes it on the current device
            init("gloo", **kwargs)

        return init_process_group

    def _collective(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def collective(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            label = label_of(tensor)
            assert label is not None, f"{name} of a tensor on the CPU: NCCL has none"
            self.touch(name, label)
            return self._run_as_nccl(lambda: call(tensor, *args, **kwargs))

        return collective

    def _run_as_nccl(self, call: Callable[[], Any]) -> Any:
        """Call gloo. Where a peer is gone wait for an abort, as NCCL does, and end as if all were well."""
        try:
            with torch._C.DisableTorchFunction():
                work = call()
        except RuntimeError:
            self.aborted.wait()
            work = FakeWork()
        return None if work is None else FakeWork(self, work)

    def _object_collective(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
            self.touch(name, device)
            with torch._C.DisableTorchFunction():
                return call(*args, **kwargs)

        return collective

    def _batch(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        works = []
        for each in operations:
            label = label_of(each.tensor)
            assert label is not None, "point to point with a tensor on the CPU: NCCL has none"
            self.touch(each.op.__name__, label)
            works.append(self._run_as_nccl(lambda each=each: each.op(each.tensor, each.peer, each.group)))  # type: ignore[misc]
        return works

    def abort(self) -> None:
        self.touches.append(Touch("abort", self.current, "any"))
        self.aborted.set()


class FakeProperties:
    multi_processor_count = 132
    pci_domain_id = pci_device_id = 0

    def __init__(self, board: int) -> None:
        self.pci_bus_id = board


class FakeWork:
    """A collective under way; without one that is over."""

    def __init__(self, cuda: FakeCuda | None = None, work: Any = None) -> None:
        self._cuda, self._work = cuda, work

    def wait(self) -> bool:
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError:
            assert self._cuda is not None
            self._cuda.aborted.wait()
        return True


class FakeStream:
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self._cuda, self.device = cuda, torch.device("cuda", index)

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.touch("wait_stream", self.device)
        self._cuda.touch("wait_stream", other.device)

    def synchronize(self) -> None:
        self._cuda.touch("synchronize", self.device)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeStream | None = None) -> None:
        self._cuda.touch("Event", None if stream is None else stream.device)

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Self) -> float:
        return 1.0


def label_of(tensor: Any) -> int | None:
    """Return the index of the GPU that a tensor was put on; None: it is on the CPU."""
    found = getattr(tensor, "_fake_cuda", None)
    return None if found is None else int(found)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


GET_DEVICE, GET_IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _is_host(device: Any) -> bool:
    return isinstance(device, torch.device | str) and str(device) == "cpu"


#: Between the host and a device, or of any one tensor.
_CROSSING = {
    "_has_compatible_shallow_copy_type",
    "copy_",
    "__get__",
    "__set__",
    "set_",
    "requires_grad_",
    "_make_subclass",
}


class LabelMode(TorchFunctionMode):
    """Keeps for each tensor the GPU that it was put on, and stands in for what reads or changes it."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, own = getattr(func, "__name__", ""), next(_tensors(args), None)
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        if func == GET_DEVICE:
            label = label_of(own)
            return torch.device("cpu") if label is None else torch.device("cuda", label)
        if func == GET_IS_CUDA:
            return label_of(own) is not None
        if name == "pin_memory" or kwargs.pop("pin_memory", False):
            self._cuda.touch("pin_memory")
            if name == "pin_memory":
                return args[0]
        to_host = any(_is_host(value) for value in (*args, *kwargs.values()))
        named, args, kwargs = self._strip(args, kwargs)
        label = None if to_host else self._common(name, args, kwargs)
        if name in ("cpu", "numpy", "tolist"):
            return func(*args, **kwargs).clone() if name == "cpu" and label is not None else func(*args, **kwargs)
        if name == "to" and named is not None:
            self._cuda.touch(name, named)
            moved = func(*args, **kwargs)
            return self._put(moved.clone() if moved is args[0] and label != named else moved, named)
        if named is not None:
            self._cuda.touch(name, named)
        result = func(*args, **kwargs)
        if name == "__set__":
            self._put(args[0], label_of(args[1]) if isinstance(args[1], Tensor) else label)
        return self._put(result, named if named is not None else label)

    def _strip(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int | None, list[Any], dict[str, Any]]:
        """Return the GPU that a call names, and the call for the CPU."""
        found: list[Any] = []

        def is_gpu(value: Any) -> bool:
            named = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
            if named and torch.device(value).type == "cuda":
                found.append(value)
                return True
            return False

        cpu = torch.device("cpu")
        rest = [cpu if is_gpu(value) else value for value in args]
        kwargs = {key: cpu if is_gpu(value) else value for key, value in kwargs.items()}
        return (self._cuda.index_of(found[0]) if found else None), rest, kwargs

    def _common(self, name: str, args: Any, kwargs: Any) -> int | None:
        """Return the GPU of a call's tensors; as on CUDA they all are on one, but for numbers on the host."""
        tensors = [*_tensors(args), *_tensors(kwargs)]
        labels = {label for each in tensors if (label := label_of(each)) is not None}
        assert len(labels) <= 1, f"{name}: tensors on the devices {sorted(labels)}"
        if labels and name not in _CROSSING:
            host = [each for each in tensors if label_of(each) is None and each.ndim]
            assert not host, f"{name}: tensors on cuda:{min(labels)} and on the CPU, of shape {host[0].shape}"
        return min(labels, default=None)

    def _put(self, result: Any, label: int | None) -> Any:
        for tensor in _tensors(result):
            if label is None:
                tensor.__dict__.pop("_fake_cuda", None)
            else:
                tensor._fake_cuda = label  # type: ignore[attr-defined]
        return result
