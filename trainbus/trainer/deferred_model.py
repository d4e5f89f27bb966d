"""Build a model whose large parameters have no memory yet, with the initial values of the plain build to the bit.

The model is built under modes of torch's dispatcher. What would allocate a large tensor returns one on the meta
device, and what is done to it is recorded (``deferred_storage``), as torchdistX's ``deferred_init`` does. A random
operation also draws its numbers and discards them, so that everything behind it draws the same ones as in the plain
build; a replay draws them again from the same state of the generator.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from trainbus.trainer.deferred_storage import (
    DeferralError,
    DeferredStorage,
    Geometry,
    Operation,
    StorageView,
)

#: Smaller tensors are not deferred.
MIN_DEFERRED_BYTES = 2**20
#: How many operations may be replayed while the model is built, because a result of them is needed.
MAX_REPLAYED = 20_000
#: How much may be recorded of other tensors, in multiples of the least size of deferred ones.
MAX_COPIED = 64

#: What makes a tensor of another one's shape and type, without its values.
LIKE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
#: What has the same strides on the meta device, beside operators with the tag ``pointwise``.
SAME_STRIDES = {"_to_copy", "clone"}
#: What gives a deferred tensor other memory.
MOVES = {"resize_", "resize_as_", "set_"}
#: What reads or hands out a tensor's memory behind the dispatcher's back.
MEMORY_ACCESS = {
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy()",
    Tensor.__dlpack__: "DLPack",
    Tensor.data_ptr: "data_ptr()",
    Tensor.untyped_storage: "untyped_storage()",
    Tensor.storage: "storage()",
    Tensor.share_memory_: "share_memory_()",
    Tensor.__reduce_ex__: "pickle",
}
#: What reads tensors on the host, all of them: it never gets to the dispatcher, or refuses operands on two devices.
READS = {Tensor.tolist, torch._weight_norm}
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True, slots=True)
class DeferredModel:
    """A model, and how to make its deferred parameters, which are on the meta device."""

    module: nn.Module
    #: The storages of the deferred parameters by address.
    deferred: Mapping[int, DeferredStorage] = field(default_factory=dict)
    #: Why no parameter is deferred; empty if nothing is in the way.
    fallback_reason: str = ""

    def is_deferred(self, parameter: Tensor) -> bool:
        """Return whether the parameter has no memory yet; parameters that share a storage have it together."""
        return self._find(parameter) is not None

    def materialize(self, parameter: Tensor) -> Tensor:
        """Return the parameter's initial values: a fresh tensor on the host of the same shape, strides and dtype.

        In any order, any number of times; a parameter that is not deferred is returned itself. While it runs, it takes
        the memory of the largest operation. torch's generator stays where it is.
        """
        storage = self._find(parameter)
        if storage is None:
            return parameter.detach()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return storage.materialize(Geometry.of(parameter))

    def _find(self, tensor: Tensor) -> DeferredStorage | None:
        return self.deferred.get(tensor.untyped_storage()._cdata) if type(tensor) is nn.Parameter else None


def build_deferred(build: Callable[[], nn.Module], *, min_bytes: int = MIN_DEFERRED_BYTES) -> DeferredModel:
    """Call ``build`` so that parameters of ``min_bytes`` or more have no memory; all other tensors are real.

    Where that cannot be exact, ``build`` is called again, plainly, from the same state of the generators of torch,
    numpy and Python: then no parameter is deferred, and a line of output says why. The generators end where a plain
    build leaves them.
    """
    start = RandomState.capture()
    deferral = Deferral(min_bytes)
    try:
        with DeferralMode(deferral), HostDeviceMode(deferral):
            module = build()
        return DeferredModel(module, _keep_parameters(module, deferral))
    except Exception as error:
        reason = deferral.refusal or (str(error) if isinstance(error, DeferralError) else repr(error))
    start.restore()
    print(f"trainbus: this rank builds the whole model before it is sharded: {reason}", flush=True)
    return DeferredModel(build(), fallback_reason=reason)


class Deferral:
    """The deferred storages of one build, and what each call of an operator does to them."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._storages: dict[int, DeferredStorage] = {}
        self._replayed = self._copied_bytes = 0
        #: Why the build is not exact, even if the model's code has caught the error.
        self.refusal = ""

    def find(self, tensor: Tensor) -> DeferredStorage | None:
        """Return the deferred storage that the tensor lies in; None: it is no deferred tensor."""
        return self._storages.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    def refuse(self, reason: str) -> DeferralError:
        """Note that the build cannot be exact, and why; the first reason counts."""
        self.refusal = self.refusal or reason
        return DeferralError(reason)

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an ATen operator, or record the call."""
        tensors = _tensors((args, kwargs))
        if _takes_device(func) and (not tensors or (func._opname in LIKE and len(tensors) == 1)):
            return self._create(func, args, kwargs)
        if not any(self.find(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        try:
            return self._operate(func, args, kwargs)
        except Exception as error:
            self.refuse(str(error) if isinstance(error, DeferralError) else f"{func}: {error}")
            raise

    # --- new tensors ----------------------------------------------------------------------------

    def _create(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor from no values: only its shape and type may be those of an argument."""
        like = _tensors(args)
        device = kwargs.get("device") or (CPU if not like or self.find(like[0]) else like[0].device)
        if torch.device(device).type == "meta" and func is torch.ops.aten.scalar_tensor.default:
            device = CPU  # a number that is assigned to a part of a deferred tensor
        if torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        args, kwargs = tree_map(_to_meta, args), {**kwargs, "device": CPU}
        sample = self._sample(func, args, kwargs)
        if sample is None or sample.nbytes < self.min_bytes:
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            raise self.refuse("a large tensor is in pinned memory")
        operation = self._record(func, args, kwargs)
        if operation.random_state is not None:
            func(*args, **kwargs)
        self._add(sample, operation, 0)
        return sample

    def _sample(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return what the call makes, on the meta device; None: only the call itself shows it."""
        if kwargs.get("layout") not in (None, torch.strided):
            return None
        try:
            found = func(*args, **{**kwargs, "device": META, "pin_memory": False})
        except (NotImplementedError, RuntimeError, TypeError):
            return None
        return found if isinstance(found, Tensor) else None

    def _add(self, tensor: Tensor, birth: Operation, output: int) -> None:
        storage = DeferredStorage(tensor, birth, output)
        self._storages[storage.meta._cdata] = storage

    # --- operations on deferred tensors ---------------------------------------------------------

    def _operate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(func, args, kwargs)
        written = _written(func, args, kwargs)
        is_deferred = {self.find(tensor) is not None for tensor in written}
        if len(is_deferred) > 1:
            raise DeferralError(f"{func} writes to large and to small tensors")
        if torch.Tag.inplace_view in func.tags or _returns_views(func):
            if False in is_deferred:
                raise DeferralError(f"{func} makes a small tensor share a large one's memory")
            return func(*args, **kwargs)  # on the meta device: no bytes change
        if True in is_deferred:
            return self._write(func, args, kwargs, written)
        operation = self._record(func, args, kwargs)
        if written:
            return self._compute(operation)
        if operation.random_state is None and (torch.Tag.pointwise in func.tags or func._opname in SAME_STRIDES):
            return self._derive(operation, args, kwargs)
        return self._compute_and_defer(operation)

    def _check(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in _tensors((args, kwargs)):
            if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                raise DeferralError(f"{func} gets a {type(tensor).__name__}")
            if self.find(tensor) is None and tensor.device.type != "cpu":
                raise DeferralError(f"{func} gets a tensor on {tensor.device}")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise DeferralError(f"a large tensor moves to {device}")
        if func._opname in MOVES and func is not torch.ops.aten.set_.source_Tensor:
            raise DeferralError(f"{func} gives a large tensor other memory")

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """Return the call with views in place of deferred tensors."""
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            if any(_is_own(leaf) for leaf in tree_leaves((args, kwargs))):
                raise self.refuse(f"{func} draws from a generator of its own")
            state = torch.get_rng_state()
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": CPU}
        args, kwargs = tree_map(self._refer, (args, kwargs))
        return Operation(func, args, kwargs, torch.get_default_dtype(), state)

    def _refer(self, leaf: Any) -> Any:
        storage = self.find(leaf) if isinstance(leaf, Tensor) else None
        return leaf if storage is None else StorageView(storage, storage.version, Geometry.of(leaf))

    def _write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        """Record a call that writes to deferred tensors."""
        operation = self._copy_inputs(self._record(func, args, kwargs))
        before = [Geometry.of(tensor) for tensor in written]
        result = func(*tree_map(self._on_meta, args), **tree_map(self._on_meta, kwargs))
        if before != [Geometry.of(tensor) for tensor in written]:
            raise DeferralError(f"{func} changes the shape of its result")
        if operation.random_state is not None:
            self._draw(operation, written)
        for storage in {self._storages[tensor.untyped_storage()._cdata] for tensor in written}:
            storage.append(operation)
        return result

    def _draw(self, operation: Operation, written: list[Tensor]) -> None:
        """Advance the generator as the call does. How it draws may depend on the strides of what it fills."""
        _, *rest = operation.args
        if any(isinstance(leaf, Tensor | StorageView) for leaf in tree_leaves((rest, operation.kwargs))):
            self._compute(operation)
        else:  # it does not depend on what was there before
            operation.func(Geometry.of(written[0]).allocate(), *rest, **operation.kwargs)

    def _derive(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call that need not be made to know their shapes and strides."""
        operation = self._copy_inputs(operation)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        result = operation.func(*tree_map(self._on_meta, args), **tree_map(self._on_meta, kwargs))
        for number, leaf in enumerate(tree_leaves(result)):
            self._add(leaf, operation, number)
        return result

    def _compute_and_defer(self, operation: Operation) -> Any:
        """Make the call, and return its large results deferred, its small ones as they are."""
        leaves, structure = tree_flatten(self._compute(operation))
        is_large = [isinstance(leaf, Tensor) and leaf.nbytes >= self.min_bytes for leaf in leaves]
        if any(is_large):
            operation = self._copy_inputs(operation)
        for number, leaf in enumerate(leaves):
            if is_large[number]:
                leaves[number] = replace(Geometry.of(leaf), offset=0).allocate("meta")
                self._add(leaves[number], operation, number)
        return tree_unflatten(leaves, structure)

    def _copy_inputs(self, operation: Operation) -> Operation:
        self._copied_bytes += operation.real_bytes
        if self._copied_bytes > MAX_COPIED * self.min_bytes:
            raise DeferralError("the model fills its large tensors from others")
        return operation.copy_inputs(self.min_bytes)

    def _compute(self, operation: Operation) -> Any:
        """Make a recorded call now."""
        self._replayed += operation.cost()
        if self._replayed > MAX_REPLAYED:
            raise DeferralError("the model reads its large tensors too often while it is built")
        keeps_state = operation.random_state is None
        with torch.no_grad(), torch.random.fork_rng(devices=[]) if keeps_state else nullcontext():
            return operation.run({})

    def compute(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method that reads tensors, with real ones in place of deferred ones."""
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            return method(*tree_map(self._to_real, args), **tree_map(self._to_real, dict(kwargs)))

    def _to_real(self, leaf: Any) -> Any:
        storage = self.find(leaf) if isinstance(leaf, Tensor) else None
        return leaf if storage is None else Geometry.of(leaf).view(storage.replay())

    def _on_meta(self, leaf: Any) -> Any:
        return leaf if not isinstance(leaf, Tensor) or self.find(leaf) else _to_meta(leaf)

    # --- after the build ------------------------------------------------------------------------

    def make_real(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors their memory, in place; those that shared a storage share it again.

        Raises:
            DeferralError: a tensor is part of a graph of gradients, or other tensors are views of it.
        """
        by_storage: dict[DeferredStorage, list[Tensor]] = {}
        for tensor in tensors:
            if (storage := self.find(tensor)) is not None:
                by_storage.setdefault(storage, []).append(tensor)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for storage, sharers in by_storage.items():
                if len(sharers) == 1:
                    _exchange(sharers[0], storage.materialize(Geometry.of(sharers[0])))
                    continue
                memory = storage.replay()
                # A view refers to its base, which can be exchanged only once nothing else does.
                for tensor in sorted(sharers, key=lambda tensor: not tensor._is_view()):
                    _exchange(tensor, Geometry.of(tensor).view(memory))

    def storages_of(self, parameters: Iterable[Tensor]) -> dict[int, DeferredStorage]:
        """Return the deferred storages that the parameters lie in, by address."""
        return {each.meta._cdata: each for each in map(self.find, parameters) if each is not None}


class DeferralMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the calls of ATen operators to a ``Deferral``."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferral = deferral

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._deferral.dispatch(func, args, kwargs or {})


class HostDeviceMode(TorchFunctionMode):
    """Shows deferred tensors as what they are in the plain build: tensors on the CPU."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral
        self._properties: dict[Any, Any] = {
            _getter("device"): CPU,
            _getter("is_meta"): False,
            _getter("is_cpu"): True,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.type_as):
            convert = self._convert_operand if self._deferral.find(args[0]) is None else self._convert_target
            tensor, *rest = args
            return Tensor.to(tensor, *map(convert, rest), **{key: convert(value) for key, value in kwargs.items()})
        if self._deferral.find(args[0]) is None:
            return func(*args, **kwargs)
        if func in self._properties:
            return self._properties[func]
        if func in MEMORY_ACCESS:
            raise self._deferral.refuse(f"the model uses {MEMORY_ACCESS[func]} of a large tensor")
        if func in READS:
            return self._deferral.compute(func, args, kwargs)
        if func is Tensor.cpu:
            return args[0]
        return func(*args, **kwargs)

    def _convert_target(self, argument: Any) -> Any:
        """Return an argument of ``to`` for a deferred tensor, whose host is the meta device."""
        if isinstance(argument, Tensor):
            return argument.dtype if argument.device == CPU else argument
        if not isinstance(argument, str | torch.device):
            return argument
        if torch.device(argument).type == "meta":
            raise self._deferral.refuse("a large tensor moves to the meta device")
        return META if torch.device(argument).type == "cpu" else argument

    def _convert_operand(self, argument: Any) -> Any:
        """Return an argument of ``to`` for a real tensor, which must not follow a deferred one to the meta device."""
        is_deferred = isinstance(argument, Tensor) and self._deferral.find(argument) is not None
        return argument.dtype if is_deferred else argument


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the generators that ``seed_all`` seeds."""

    host: Tensor
    devices: list[Tensor] | None
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        """Return the state as it is. GPUs that nothing has used yet stay so."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), devices, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.devices is not None:
            torch.cuda.set_rng_state_all(self.devices)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(torch.initial_seed())
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def _keep_parameters(module: nn.Module, deferral: Deferral) -> dict[int, DeferredStorage]:
    """Leave the module's large parameters deferred; give every other tensor of the build its memory."""
    if deferral.refusal:
        raise DeferralError(deferral.refusal)
    deferred = [each for each in module.parameters() if each.is_meta and each.nbytes >= deferral.min_bytes]
    others = [type(each).__name__ for each in deferred if type(each) is not nn.Parameter]
    if others:
        raise DeferralError(f"a parameter is a {others[0]}")
    kept = {id(each) for each in deferred}
    deferral.make_real(each for each in _live_tensors() if id(each) not in kept)
    if any(each.is_meta and id(each) not in kept for each in chain(module.parameters(), module.buffers())) or any(
        deferral.find(each) is None for each in deferred
    ):
        raise DeferralError("a parameter or buffer is on the meta device")
    return deferral.storages_of(deferred)


def _live_tensors() -> Iterator[Tensor]:
    """Yield all tensors of this process, wherever they are kept: in attributes, lists, closures."""
    gc.collect()
    yield from (each for each in gc.get_objects() if issubclass(type(each), Tensor))


def _exchange(tensor: Tensor, real: Tensor) -> None:
    """Put ``real`` in the place of a deferred tensor, for everything that refers to it.

    Raises:
        DeferralError: the tensor is part of a graph of gradients.
    """
    if tensor.grad_fn is not None:
        raise DeferralError("the model keeps a large tensor with the graph of its gradient")
    torch._C._swap_tensor_impl(tensor, real.requires_grad_(tensor.requires_grad))


def _getter(name: str) -> Any:
    """Return what torch calls to read an attribute of tensors."""
    return vars(torch._C.TensorBase)[name].__get__


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _takes_device(func: OpOverload) -> bool:
    """Return whether a function of no tensors makes one: what maps a file is none."""
    return func._opname != "from_file" and any(each.name == "device" for each in func._schema.arguments)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that the function writes to."""
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return _tensors([given.get(name) for name in names])


def _returns_views(func: OpOverload) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return any(each is not None and not each.is_write for each in aliases)


def _is_own(leaf: Any) -> bool:
    return isinstance(leaf, torch.Generator) and leaf is not torch.default_generator


def _to_meta(leaf: Any) -> Any:
    """Return a tensor's shape, strides and type on the meta device."""
    return replace(Geometry.of(leaf), offset=0).allocate("meta") if isinstance(leaf, Tensor) else leaf
