"""Model check: compares the structure of the model with that at the join.

A run's layout is fixed at join. A parameter that is added, replaced, tied or unfrozen in mid-run is in no fragment:
only this learner would train it, and no checkpoint would contain it, although every hash agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from ..common.errors import SettingError
from .model_layout import WHOLE_SECONDS, Entry, named_tensors

IN_TURN = 4
"""Parameters that each step checks, in rotation."""
_requires_grad = attrgetter("requires_grad")
_form = attrgetter("shape", "dtype")


class ModelCheck:
    """Detects changes of one model's structure. Pure: the time, in seconds of one monotonic clock, is passed in.

    The common case is a fast comparison by identity; only after a difference are tensors compared by name. Buffers may
    be replaced by others of the same shape, and trained parameters may be frozen and unfrozen.
    """

    def __init__(self, model: nn.Module, entries: Iterable[Entry], now: float) -> None:
        entries = list(entries)
        frozen = {id(tensor) for entry in entries if entry.kind == "frozen" for tensor in entry.objects}
        self._model = model
        self._named = _by_name(model)
        self._frozen_names = {name for name, (tensor, _) in self._named.items() if id(tensor) in frozen}
        self._forms = {name: _form(tensor) for name, (tensor, _) in self._named.items()}
        self._views = [
            (entry.name, entry.objects[0], other)
            for entry in entries
            for other in entry.objects[1:]
            if entry.kind != "buffer" and other.numel()
        ]
        self._next = 0
        self._looked_at = now
        self._remember()

    def look(self, now: float) -> None:
        """Call at each step. Raises SettingError that names what has changed."""
        for _ in range(min(IN_TURN, len(self._parameters))):
            place, key, tensor, frozen = self._parameters[self._next]
            self._next = (self._next + 1) % len(self._parameters)
            if place.get(key) is not tensor or (frozen and tensor.requires_grad):
                self.compare()
        if now - self._looked_at >= WHOLE_SECONDS:
            self._looked_at = now
            if not self._as_remembered():
                self.compare()

    # --- by identity -------------------------------------------------------------------------------------------------
    def _remember(self) -> None:
        modules = list(self._model.modules())
        parameters = [m._parameters for m in modules]  # noqa: SLF001 - torch has no public way to ask
        self._owners: list[dict[str, Any]] = [*parameters, *(m._modules for m in modules)]  # noqa: SLF001
        self._buffers: list[dict[str, Any]] = [m._buffers for m in modules]  # noqa: SLF001
        frozen = {id(self._named[name][0]) for name in self._frozen_names}
        self._parameters = [
            (place, key, tensor, id(tensor) in frozen)
            for place in parameters
            for key, tensor in place.items()
            if tensor is not None
        ]
        self._tensors = [tensor for _, _, tensor, _ in self._parameters]
        self._frozen = [tensor for _, _, tensor, is_frozen in self._parameters if is_frozen]
        self._objects, self._all = self._all_objects(), self._everything_else()

    def _as_remembered(self) -> bool:
        objects = self._all_objects()
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._everything_else() == self._all
            and not any(map(_requires_grad, self._frozen))
            and all(one.data_ptr() == other.data_ptr() for _, one, other in self._views)
        )

    def _all_objects(self) -> list[Any]:
        """Parameters and modules. Most modules lack one of the two, which is skipped quickly."""
        return [value for place in self._owners if place for value in place.values()]

    def _everything_else(self) -> list[Any]:
        """Names, shapes and dtypes."""
        buffers = [place for place in self._buffers if place]
        return [
            *(key for place in self._owners if place for key in place),
            *(key for place in buffers for key in place),
            *(value if value is None else _form(value) for place in buffers for value in place.values()),
            *map(_form, self._tensors),
        ]

    # --- by name -----------------------------------------------------------------------------------------------------
    def compare(self) -> None:
        """Compare everything. Raises SettingError if a tensor of the run has changed; else remembers the state."""
        found = next(self._changes(), None)
        if found is not None:
            raise SettingError(f"{found} after join(), but the run uses the model as it joined; {_REMEDY}")
        self._remember()

    def _changes(self) -> Iterator[str]:
        now = _by_name(self._model)
        for name in now:
            if name not in self._named:
                yield f"{name} was added to the model"
        for name, (tensor, buffer) in self._named.items():
            if name not in now:
                yield f"{name} was removed from the model"
                continue
            other, is_buffer = now[name]
            if is_buffer != buffer or (not buffer and other is not tensor):
                yield f"{name} was replaced by another tensor (or tied to one, or untied)"
            elif (form := _form(other)) != self._forms[name]:
                yield f"{name} changed from {_words(self._forms[name])} to {_words(form)}"
            elif name in self._frozen_names and other.requires_grad:
                yield f"{name}, frozen in this run, was given requires_grad=True"
        for name, one, other in self._views:
            if one.data_ptr() != other.data_ptr():
                yield f"{name} stopped sharing its memory with the parameter tied to it"


_REMEDY = "make the change before join(), or close the session and join a run of its own with the changed model"


def _by_name(model: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Each tensor of the model, and whether it is a buffer."""
    return {named.name: (named.tensor, named.kind == "buffer") for named in named_tensors(model)}


def _words(form: Any) -> str:
    shape, dtype = form
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
