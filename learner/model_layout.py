"""Model layout: the tensors of a model, their names, and their role in the run (trained or static, tied, merge).

Names are those of the model's own state_dict, without the parts that wrappers such as torch.compile and DDP insert. A
tensor with several names is one tensor: it is sent once and written once, in place, and so stays tied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.errors import SettingError
from ..common.fragments import DTYPES, TRAINABLE_DTYPES, Kind, Layout, MergeKind, TensorSpec, strip_wrappers
from .memory_overlap import first_overlap, overlaps_itself

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
WHOLE_SECONDS = 1.0
"""Shortest interval between checks of a whole model, or of all groups of its optimizers."""
DTYPE_OF = {name: getattr(torch, name) for name in DTYPES}
WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
"""Wrapper modules: where the class is defined, its name, and the attribute that holds the wrapped module."""


@dataclass
class Entry:
    """One tensor of the model: its names, and the tensors to read and write."""

    names: list[str]
    tensor: Tensor
    """The model's own parameter or buffer."""
    kind: Kind
    embedding: bool = False
    """Under at least one of its names it is the weight of an nn.Embedding."""
    master: Tensor | None = None
    """f32 tensor of the same shape that the optimizer steps instead of the parameter."""
    merge: MergeKind = field(default="rda")
    given_names: set[str] = field(default_factory=set)
    """The same names including the parts that wrappers insert, as in the model that was passed."""
    objects: list[Tensor] = field(default_factory=list)
    """Every parameter or buffer object with these names: several if two objects are views of the same memory."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def source(self) -> Tensor:
        """The tensor that holds the training state: the master, if there is one."""
        return self.tensor if self.master is None else self.master

    @property
    def sources(self) -> list[Tensor]:
        """Tensors of which an optimizer must hold at least one, so that the entry is trained."""
        return self.objects if self.master is None else [self.master]

    def spec(self) -> TensorSpec:
        return TensorSpec(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=str(self.source.dtype).removeprefix("torch."),
            kind=self.kind,
            merge=self.merge if self.kind == "trainable" else "rda",
            tied=tuple(self.names[1:]),
        )


def inventory(
    model: nn.Module,
    optimizer: Optimizers = None,
    masters: Mapping[str, Tensor] | None = None,
    merge: Mapping[str, MergeKind] | None = None,
) -> list[Entry]:
    """Every parameter and persistent buffer of `model`, each once, in the model's order, parameters first.

    optimizer: if given, each trainable parameter (or its master) must be in its groups.
    masters: name -> f32 tensor that the optimizer steps instead of a bf16 or f16 parameter.
    merge: name -> "rda" or "mean", to override the default (mean for embeddings and tensors tied to one, else rda).
    Raises SettingError that names the first invalid tensor.
    """
    entries = list(_once(named_tensors(model)))
    _check(entries)
    by_name = {name: entry for entry in entries for name in entry.names}
    by_name |= {name: entry for entry in entries for name in entry.given_names}
    for entry in entries:
        entry.merge = "mean" if entry.embedding else "rda"
    for name, kind in (merge or {}).items():
        _known(by_name, name, "merge").merge = _merge_kind(name, kind)
    for name, tensor in (masters or {}).items():
        _set_master(_known(by_name, name, "masters"), tensor)
    _check_memory(entries)
    if optimizer is not None:
        _check_stepped(entries, as_list(optimizer))
    if not any(e.kind == "trainable" and e.tensor.numel() for e in entries):
        raise SettingError("the model has no trainable parameter: each has requires_grad=False, or no elements")
    return entries


def layout_of(
    model: nn.Module,
    optimizer: Optimizers = None,
    masters: Mapping[str, Tensor] | None = None,
    merge: Mapping[str, MergeKind] | None = None,
) -> Layout:
    """The layout of the model; arguments and errors as of `inventory`."""
    return Layout(tuple(entry.spec() for entry in inventory(model, optimizer, masters, merge)))


def live_buffers(entries: Iterable[Entry]) -> list[str]:
    """Names of floating-point buffers: the model may change them while it trains (running statistics)."""
    return [e.name for e in entries if e.kind == "buffer" and e.tensor.is_floating_point()]


class _Named(NamedTuple):
    """A tensor under one of its names."""

    name: str
    given_name: str
    tensor: Tensor
    kind: Kind
    embedding: bool = False


def named_tensors(model: nn.Module) -> Iterator[_Named]:
    """Each parameter and persistent buffer, once for each of its names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    own = _own_paths(modules)
    embeddings = {
        id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            kind: Kind = "trainable" if parameter.requires_grad else "frozen"
            yield _Named(_join(own[path], name), _join(path, name), parameter, kind, id(parameter) in embeddings)
    for path, module in modules.items():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - torch has no public way to ask what is persistent
            if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield _Named(_join(own[path], name), _join(path, name), buffer, "buffer")


def _own_paths(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Path -> the same path in the model without its wrappers. Parents precede their children."""
    wrappers = [
        (getattr(sys.modules[place], name), attribute)
        for place, name, attribute in WRAPPERS
        if place in sys.modules  # a class that was never imported has no objects
    ]
    own: dict[str, str] = {}
    for path in modules:
        parent, _, attribute = path.rpartition(".")
        holder = modules[parent] if path else None
        wrapped = any(isinstance(holder, wrapper) and attribute == held for wrapper, held in wrappers)
        own[path] = own[parent] if wrapped else _join(own[parent], attribute) if path else ""
    return own


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _once(rows: Iterable[_Named]) -> Iterator[Entry]:
    """Names of the same memory become one entry, whether of one object or of two views."""
    entries: dict[Any, Entry] = {}
    for name, given_name, tensor, kind, embedding in rows:
        key: Any = id(tensor)
        if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        entry = entries.setdefault(key, Entry(names=[], tensor=tensor, kind=kind))
        if name not in entry.names:
            entry.names.append(name)
        entry.given_names.add(given_name)
        if all(tensor is not known for known in entry.objects):
            entry.objects.append(tensor)
        entry.embedding |= embedding
        if kind == "trainable":
            entry.kind = kind
    yield from entries.values()


def _check(entries: Sequence[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        tensor, dtype = entry.tensor, str(entry.tensor.dtype).removeprefix("torch.")
        if hasattr(tensor, "to_local"):
            raise SettingError(f"{entry.name} is a DTensor: sharded models are not supported; join with a whole model")
        if tensor.is_meta or is_lazy(tensor):
            raise SettingError(f"{entry.name} has no values yet; initialise the model before it joins")
        if tensor.layout is not torch.strided:
            raise SettingError(f"{entry.name} is a {tensor.layout} tensor; only dense tensors are supported")
        if dtype not in DTYPES or (entry.kind == "trainable" and dtype not in TRAINABLE_DTYPES):
            allowed = TRAINABLE_DTYPES if entry.kind == "trainable" else tuple(DTYPES)
            raise SettingError(f"{entry.name} is {entry.kind} and {dtype}; supported are {', '.join(allowed)}")
        for name in entry.names:
            if name in seen:
                raise SettingError(f"two tensors of the model are both named {name} without wrapper prefixes")
            seen.add(name)


def _known(by_name: Mapping[str, Entry], name: str, where: str) -> Entry:
    entry = by_name.get(name) or by_name.get(strip_wrappers(name))
    if entry is None:
        raise SettingError(f"{where} names {name!r}, which the model does not have")
    return entry


def _merge_kind(name: str, kind: str) -> MergeKind:
    if kind not in ("rda", "mean"):
        raise SettingError(f"merge of {name} must be 'rda' or 'mean', not {kind!r}")
    return "mean" if kind == "mean" else "rda"


def _set_master(entry: Entry, tensor: Tensor) -> None:
    if entry.kind != "trainable":
        raise SettingError(f"masters names {entry.name}, which is not trainable")
    if tensor.dtype != torch.float32 or tensor.shape != entry.tensor.shape:
        raise SettingError(
            f"the master of {entry.name} must be float32 of shape {list(entry.tensor.shape)}, "
            f"not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    entry.master = tensor


def _check_memory(entries: Sequence[Entry]) -> None:
    """Each tensor must be writable in place, and each trained one without changing another."""
    rows = [(e.name, e.tensor, e.kind == "trainable") for e in entries]
    rows += [(f"the master of {e.name}", e.master, True) for e in entries if e.master is not None]
    for name, tensor, _ in rows:
        if overlaps_itself(tensor):
            raise SettingError(
                f"{name} has elements that are the same memory (stride {list(tensor.stride())}, as after expand()), so "
                "it cannot be written; make it a tensor of its own by .clone() before join()"
            )
    if (pair := first_overlap(rows)) is not None:
        raise SettingError(
            f"{pair[0]} and {pair[1]} share memory without being the same view of it, so the run would hold two values "
            "for one; use one parameter in both places, or give each its own memory by .clone() before join()"
        )


def as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Each optimizer, of torch or with groups like those of torch. Raises SettingError for anything else."""
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups")
    found: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for each in found:
        if not hasattr(each, "param_groups"):
            raise SettingError(
                f"optimizer must be a torch optimizer, several of them, or None, and a {type(each).__name__} has no "
                "param_groups"
            )
    return found


def stepped(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The ids of all tensors in the groups of these optimizers."""
    return {id(tensor) for each in optimizers for group in each.param_groups for tensor in group["params"]}


def _check_stepped(entries: Sequence[Entry], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    held = stepped(optimizers)
    for entry in entries:
        if entry.kind == "trainable" and entry.tensor.numel() and not any(id(s) in held for s in entry.sources):
            what = "its master" if entry.master is not None else "it"
            raise SettingError(
                f"{entry.name} is trainable, but no optimizer group holds {what}: what the run sends would be undone "
                "or never trained. Give all optimizers, freeze it, or name the f32 tensor that is stepped in masters"
            )
    owned = Owned(entries)
    for each in optimizers:
        if (problem := owned.problem(each)) is not None:
            raise SettingError(problem)


class Owned:
    """Which tensors of a model an optimizer may step: those that the run trains."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        """Kept alive, so that the ids below stay unique."""
        self.trained: set[int] = set()
        """Ids of the tensors that an optimizer steps."""
        self._others: dict[int, Entry] = {}
        for entry in self.entries:
            self._others.update((id(tensor), entry) for tensor in entry.objects)
            if entry.kind == "trainable":
                self.trained.update(id(source) for source in entry.sources)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer steps a tensor of the run."""
        return any(id(tensor) in self.trained for group in optimizer.param_groups for tensor in group["params"])

    def problem(self, optimizer: torch.optim.Optimizer) -> str | None:
        """What is wrong with the optimizer's groups, as a sentence; None if they hold only trained tensors."""
        for number, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                if id(tensor) in self.trained or not tensor.numel():
                    continue
                where = f"group {number} of {type(optimizer).__name__}"
                entry = self._others.get(id(tensor))
                if entry is None:
                    names = group.get("param_names") or ()
                    what = names[place] if place < len(names) else f"a tensor of shape {list(tensor.shape)}"
                    return (
                        f"{where} holds {what}, which is not part of the model that joined: its training would be in "
                        "no file and reach no other learner. Join with a module that owns it, too (nn.ModuleList "
                        "makes one of two), or give it an optimizer of its own, and it stays this learner's"
                    )
                if entry.master is not None:
                    return f"{where} holds {entry.name} itself, whose master is to be stepped; give it one of the two"
                if tensor.requires_grad:
                    return f"{where} would train {entry.name}, which is {_UNTRAINED[entry.kind]}"
        return None


_UNTRAINED = {
    "buffer": "a buffer, and buffers are not merged; make it a parameter before join()",
    "frozen": "frozen in this run, so its training would be in no file and reach no other learner; to unfreeze it "
    "later, join with requires_grad=True and freeze it after join()",
}
