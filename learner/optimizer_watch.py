"""Optimizer watch: which optimizers step a run's tensors, whether one has stepped, and what their groups hold.

A global hook of torch runs after each optimizer step of the process. So it also sees an optimizer that is made in
mid-run, and one inside a wrapper.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .model_layout import WHOLE_SECONDS, Optimizers, Owned, as_list


class OptimizerWatch:
    """The optimizers of one session. With optimizer=None at join nothing is watched, and each call counts as a step."""

    def __init__(self, owned: Owned, optimizer: Optimizers, now: float) -> None:
        self.watches = optimizer is not None
        self.stepped = False
        """One of them has stepped; the reader resets it."""
        self.after_step: Callable[[torch.optim.Optimizer], None] | None = None
        """Called right after the next step, while the gradients exist."""
        self._owned = owned
        self._ours: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._strangers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        """Optimizers of other models, by id; checked again each second."""
        self._problem: str | None = None
        self._looked_at = now
        for each in as_list(optimizer):
            self._ours[id(each)] = weakref.ref(each)
        self._remember()
        if self.watches:
            _watches.add(self)

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        """Optimizers still in use: those given to join(), and those made since for the same tensors."""
        return [optimizer for ref in self._ours.values() if (optimizer := ref()) is not None]

    def close(self) -> None:
        """Stop watching."""
        _watches.discard(self)

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each optimizer step of the process, in the thread that makes it."""
        key = id(optimizer)
        if (ours := self._ours.get(key)) is not None and ours() is optimizer:
            self._note(optimizer)
        elif (stranger := self._strangers.get(key)) is None or stranger() is not optimizer:
            self._classify(optimizer)

    def look(self, now: float) -> str | None:
        """At each session step. Returns a sentence if a group holds a tensor that the run does not train, else None."""
        if not self.watches:
            return None
        whole = now - self._looked_at >= WHOLE_SECONDS
        if whole:
            self._looked_at = now
            self._strangers = {}
        if self._sizes() != self._known_sizes or (whole and self._ids() != self._known_ids):
            for optimizer in self.all:
                self._problem = self._problem or self._owned.problem(optimizer)
            self._remember()
        return None if self._problem is None else f"{self._problem} (this was changed after join())"

    def _classify(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch a new optimizer if it steps the run's tensors; report one that steps others as well."""
        if not self._owned.holds(optimizer):
            self._strangers[id(optimizer)] = weakref.ref(optimizer)
            return
        self._problem = self._problem or self._owned.problem(optimizer)
        self._ours = {key: ref for key, ref in self._ours.items() if ref() is not None}
        self._ours[id(optimizer)] = weakref.ref(optimizer)
        self._remember()
        self._note(optimizer)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if _was_skipped(optimizer):
            return
        self.stepped = True
        if self.after_step is not None:
            self.after_step(optimizer)

    # --- what the groups hold ----------------------------------------------------------------------------------------
    def _remember(self) -> None:
        self._known_sizes, self._known_ids = self._sizes(), self._ids()

    def _sizes(self) -> list[int]:
        return [
            len(group["params"])
            for ref in self._ours.values()
            if (optimizer := ref()) is not None
            for group in optimizer.param_groups
        ]

    def _ids(self) -> list[int]:
        """Ids stay unique: the run's own tensors live as long as the session, and no others are permitted here."""
        return [id(tensor) for optimizer in self.all for group in optimizer.param_groups for tensor in group["params"]]


def _was_skipped(optimizer: Any) -> bool:
    """Whether a fused optimizer skipped its step because a gradient scaler has set its attribute `found_inf`.

    Reading it waits for the device, as the scaler itself does with any other optimizer.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class _Watches:
    """All watches of optimizer steps in this process, behind one hook.

    The hook is never removed, and a change replaces the tuple: torch iterates over its hooks while other threads train,
    so their number must not change. Sessions that are no longer referenced are removed automatically.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._refs: tuple[weakref.ref[OptimizerWatch], ...] = ()
        self._hooked = False

    def add(self, watch: OptimizerWatch) -> None:
        with self._lock:
            self._refs = (*self._refs, weakref.ref(watch, self._forget))
            if not self._hooked:
                register_optimizer_step_post_hook(self._hook)
                self._hooked = True

    def discard(self, watch: OptimizerWatch) -> None:
        with self._lock:
            self._refs = tuple(ref for ref in self._refs if ref() is not watch)

    def _forget(self, gone: weakref.ref[OptimizerWatch]) -> None:
        with self._lock:
            self._refs = tuple(ref for ref in self._refs if ref is not gone)

    def _hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for ref in self._refs:
            watch = ref()
            if watch is not None:
                watch.saw_step(optimizer)


_watches = _Watches()
