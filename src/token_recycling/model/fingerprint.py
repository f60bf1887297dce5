"""Everything that a model's forward depends on but the values of its weights, and what changed.

A target is right for the model that was probed. Everybody may change that model afterwards: put in
modules, set attributes, register hooks, replace functions. A ``Fingerprint`` has copies of all
dictionaries that a forward reads, and compares them with what they contain now. Comparing two lists
of dictionaries is one call into the interpreter: 0.2 ms for 400 modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._device import DeviceContext
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from skinny_kernels.sdpa import stock_of
from token_recycling.model.foreign_code import (
    GLOBAL_HOOKS,
    LIBRARIES,
    OURS,
    belongs,
    foreign_code,
    function_of,
    home,
    named_modules,
    title,
)

# Dictionaries of a module that its forward reads, beside its ``__dict__``.
INSIDE = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
# Attributes that no forward reads: what ``generate`` uses or leaves, and what is for training.
UNREAD = frozenset(
    (
        "generate",
        "generate_batch",
        "init_continuous_batching",
        "generation_config",
        "save_pretrained",
        "_cache",
        "_extract_generation_mode_kwargs",
        "_token_recycling",
        "_is_full_backward_hook",
        "_compiled_call",
        "_last_compile_config",
        "warnings_issued",
        "__warningregistry__",
        "_non_persistent_buffers_set",
    )
)
DEEPEST = 4  # levels of containers and functions that are followed
SMALL = 16  # numbers of a tensor whose values are compared, where unknown code may switch by them
LAYOUT = (Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype"))
Scalar = (bool, int, float, str, type(None), torch.dtype, torch.device)


def _is_read(key: Any) -> bool:
    """Return whether a forward may read an attribute of this name."""
    if not isinstance(key, str):
        return True
    return key not in UNREAD and "state_dict" not in key and "backward" not in key


def _tensor_key(tensor: Tensor) -> Any:
    """Return where a tensor is and how it is laid out; of a subclass, of the tensors inside."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) not in (Tensor, nn.Parameter) and inner is not None:
        return tuple(_tensor_key(getattr(tensor, name)) for name in inner()[0])
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except (RuntimeError, NotImplementedError):  # subclasses without memory of their own
        return id(tensor), tensor.shape, tensor.dtype


def _layouts(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Return the keys of tensors (see ``_tensor_key``), each part of all in a list."""
    tensors = list(tensors)
    try:
        return [list(map(read, tensors)) for read in LAYOUT]
    except (RuntimeError, NotImplementedError):
        return [list(map(_tensor_key, tensors))]


def _values_key(tensor: Tensor) -> Any:
    """Return a key of a tensor's values: it changes with most writes, for few numbers with all."""
    version = -1 if tensor.is_inference() else tensor._version
    few = tensor.numel() <= SMALL and tensor.device.type == "cpu"
    return version, tuple(tensor.detach().flatten().tolist()) if few else None


def _is_equal(before: Any, now: Any) -> bool:
    """Return whether two values are the same to a forward; what cannot be compared is not."""
    if before is now:
        return True
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return type(before) is type(now) and _tensor_key(before) == _tensor_key(now)
    try:
        return type(before) is type(now) and bool(before == now)
    except Exception:  # whatever a class of somebody else raises
        return False


def environment(device: torch.device) -> tuple[Any, ...]:
    """Return the modes of this thread and process that results depend on."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    # A default device is a mode too, but all tensors of ours have a device.
    return (
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.get_num_threads() if device.type == "cpu" else 0,
        precision(),
        tuple(type(mode) for mode in modes if not isinstance(mode, DeviceContext)),
        torch._C._len_torch_dispatch_stack(),
    )


MODES = ("autocast", "the number of threads", "the precision of products", "a mode", "a mode")


def precision() -> str:
    """Return how exactly PyTorch multiplies float32 matrices."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer setting of the same was used
        return str(torch.backends.cuda.matmul.fp32_precision)


class _Snapshot:
    """A state of a model.

    Attributes:
        names: of the containers, as a user would write them.
        containers: the dictionaries, lists and sets themselves.
        copies: what they contained.
        shared: containers, and their copies, that a shadow of the model reads too.
        modules: all modules.
        classes: their classes.
        tensors: all tensors of the modules, by name.
        layouts: see ``_layouts``.
        variables: of unknown code: a function that reads each, by name.
        values: what they were.
        environment: see ``environment``.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.names: list[str] = []
        self.containers: list[Any] = []
        self.copies: list[Any] = []
        self.shared: tuple[list[Any], list[Any]] = ([], [])
        self.modules: list[nn.Module] = []
        self.tensors: dict[str, Tensor] = {}
        self.variables: dict[str, Callable[[], Any]] = {}
        self._seen: set[int] = set()
        for name, module in named_modules(model):
            self.modules.append(module)
            self._module(name, module)
        self.classes = list(map(type, self.modules))
        for base in dict.fromkeys(
            base for cls in dict.fromkeys(self.classes) for base in cls.__mro__
        ):
            self._code(base)
        self._add("torch.nn.functional", vars(nn.functional), dict(vars(nn.functional)))
        for name in GLOBAL_HOOKS:
            hooks = getattr(torch_module, name)
            self._add("all modules", hooks, dict(hooks))
        for functions in (
            ALL_ATTENTION_FUNCTIONS._global_mapping,
            ALL_ATTENTION_FUNCTIONS._local_mapping,
        ):
            copy = {key: stock_of(function) for key, function in functions.items()}
            self._add("the attention functions", functions, copy)
        self.layouts = _layouts(self.tensors.values())
        self.values = self.read()
        self.environment = environment(device)

    def read(self) -> list[Any]:
        """Return what the variables are now."""
        return [read() for read in self.variables.values()]

    def _add(self, name: str, container: Any, copy: Any, *, shared: bool = True) -> None:
        """Add a container that is not known yet; ``shared``: a shadow has no copy of it."""
        self._seen.add(id(container))
        if shared:
            self.shared[0].append(container)
            self.shared[1].append(copy)
        self.names.append(name)
        self.containers.append(container)
        self.copies.append(copy)

    def _is_new(self, value: Any) -> bool:
        """Return whether this object has not been added."""
        return id(value) not in self._seen

    def _module(self, name: str, module: nn.Module) -> None:
        """Add a module: its attributes, tensors and hooks."""
        own = module.__dict__
        self._add(name, own, dict(own), shared=False)
        for part in INSIDE:
            self._add(name, own[part], dict(own[part]), shared=False)
        known = belongs(type(module).__module__, LIBRARIES)
        for part in ("_parameters", "_buffers"):
            for key, tensor in own[part].items():
                if tensor is not None:
                    self._tensor(f"{name}.{key}", tensor, known)
        for key, value in own.items():
            if _is_read(key) and key not in INSIDE and not isinstance(value, Scalar):
                self._value(f"{name}.{key}", value)

    def _tensor(self, name: str, tensor: Tensor, known: bool) -> None:
        self.tensors[name] = tensor
        if not known:
            self.variables[f"the values of {name}"] = partial(_values_key, tensor)

    def _value(self, name: str, value: Any, level: int = 0) -> None:
        """Add what an attribute or a variable contains."""
        if level > DEEPEST or isinstance(value, (*Scalar, nn.Module, type, ModuleType)):
            return
        if isinstance(value, Tensor):
            self._tensor(name, value, known=False)
            return
        function = function_of(value)
        if isinstance(function, FunctionType):
            self._function(name, function, level)
        elif not self._is_new(value):
            return
        elif isinstance(value, dict | list | set):
            if value or isinstance(value, list | set):
                self._add(name, value, value.copy())
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self._value(f"{name}[{key!r}]", item, level + 1)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                self._value(f"{name}[{index}]", item, level + 1)
        elif isinstance(value, PretrainedConfig | SimpleNamespace) or not belongs(
            type(value).__module__, (*LIBRARIES, *sys.stdlib_module_names)
        ):
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._seen.add(id(value))
                self._add(name, own, dict(own))
                for key, item in own.items():
                    if not isinstance(item, Scalar):
                        self._value(f"{name}.{key}", item, level + 1)

    def _function(self, name: str, function: FunctionType, level: int = 0) -> None:
        """Add the variables that a function of unknown code reads."""
        if not self._is_new(function) or belongs(home(function), LIBRARIES) or level > DEEPEST:
            return
        self._seen.add(id(function))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._variable(f"{variable} of {name}", partial(_content, cell), level)
        names = function.__globals__
        for variable in function.__code__.co_names:
            if variable in names:
                self._variable(f"{variable} of {name}", partial(names.get, variable), level)

    def _variable(self, name: str, read: Callable[[], Any], level: int) -> None:
        self.variables[name] = read
        self._value(name, read(), level + 1)

    def _code(self, cls: type) -> None:
        """Add a class and the Python file that it is in."""
        if self._is_new(cls):
            self._seen.add(id(cls))
            self._add(cls.__name__, vars(cls), dict(vars(cls)))
            file = sys.modules.get(cls.__module__)
            if belongs(cls.__module__, LIBRARIES):
                if file is not None and self._is_new(file.__dict__):
                    self._add(cls.__module__, file.__dict__, dict(file.__dict__))
            else:
                for key, value in list(vars(cls).items()):
                    if isinstance(value, FunctionType):
                        self._function(f"{cls.__name__}.{key}", value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


class Fingerprint:
    """The state of a model when it was taken.

    Attributes:
        foreign: why this state is not enough to know what a forward computes: a hook or a
            replaced forward of unknown code; None if it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Take the fingerprint of ``model``, whose inputs are on ``device``."""
        self._model, self._device = model, device
        self._taken = _Snapshot(model, device)
        self.foreign = foreign_code(model)

    def leaks(self) -> bool:
        """Return whether a shadow that was made when it was taken may compute otherwise now.

        Cheaper than ``change``: what the shadow has copies of is not looked at.
        """
        taken = self._taken
        containers, copies = taken.shared
        try:
            return bool(
                taken.environment != environment(self._device)
                or containers != copies
                or taken.read() != taken.values
            )
        except Exception:  # as in ``_is_same``
            return True

    def change(self) -> str | None:
        """Return in a few words what has changed first since it was taken, or None."""
        if self._is_same():
            return None
        change = self._difference()
        if change is None:  # only what no forward reads
            self._taken = _Snapshot(self._model, self._device)
        return change

    def _is_same(self) -> bool:
        taken = self._taken
        try:
            return bool(
                taken.environment == environment(self._device)
                and taken.containers == taken.copies
                and list(map(type, taken.modules)) == taken.classes
                and _layouts(taken.tensors.values()) == taken.layouts
                and taken.read() == taken.values
            )
        except Exception:  # tensors that are compared number by number, for example
            return False

    def _difference(self) -> str | None:
        taken = self._taken
        for module, cls in zip(taken.modules, taken.classes):
            if type(module) is not cls:
                name = next((n for n, m in named_modules(self._model) if m is module), "a module")
                return f"the class of {name} has changed"
        for name, container, copy in zip(taken.names, taken.containers, taken.copies):
            if (change := _changed_container(name, container, copy)) is not None:
                return change
        layouts = _layouts(taken.tensors.values())
        for name, before, now in zip(taken.tensors, zip(*taken.layouts), zip(*layouts)):
            if before != now:
                return f"{name} has moved or has another shape"
        for (name, read), before in zip(taken.variables.items(), taken.values):
            if not _is_equal(before, read()):
                return f"{name} has changed"
        now = environment(self._device)
        for name, before, present in zip(MODES, taken.environment, now):
            if before != present:
                return f"{name} has changed"
        return None


def _changed_container(name: str, container: Any, copy: Any) -> str | None:
    """Return which item of a container differs from its copy, or None."""
    if isinstance(copy, dict):
        for key in dict.fromkeys([*copy, *container]):
            if not _is_read(key):
                continue
            before, now = copy.get(key), container.get(key)
            ours = (stock_of(value) for value in (before, now))
            before, now = (None if belongs(home(v), OURS) else v for v in ours)
            if not _is_equal(before, now):
                return _described(name, key, before, now)
        return None
    return None if _is_equal(copy, container) else f"{name} has changed"


def _described(name: str, key: Any, before: Any, now: Any) -> str:
    if isinstance(key, int):  # hooks are numbered
        call = before if now is None else now
        return f"{name} {'lost' if now is None else 'got'} the hook {title(call)}"
    shown = f"{name}.{key}"
    if isinstance(before, Scalar) and isinstance(now, Scalar):
        return f"{shown} was changed from {str(before)[:40]} to {str(now)[:40]}"
    if before is None:
        return f"{shown} was added"
    return f"{shown} was {'removed' if now is None else 'replaced'}"
