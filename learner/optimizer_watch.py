"""The optimizers that step a run's tensors: which they are, whether one has stepped, what their groups hold.

They are seen by one global hook of torch, which runs after each optimizer step of the process. So an optimizer that is
made in mid-run is seen as well, and so is one inside a wrapper.
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
        """What is to be done right after the next step, while the gradients are there."""
        self._owned = owned
        self._ours: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._strangers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        """Optimizers of other models, by their ids; looked at anew each second."""
        self._problem: str | None = None
        self._looked_at = now
        for each in as_list(optimizer):
            self._ours[id(each)] = weakref.ref(each)
        self._remember()
        if self.watches:
            _watches.add(self)

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        """Those that are still in use: what was given to join(), and what was made since for the same tensors."""
        return [optimizer for ref in self._ours.values() if (optimizer := ref()) is not None]

    def close(self) -> None:
        """Watch no longer."""
        _watches.discard(self)

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After each optimizer step of the process, in the thread that makes it."""
        key = id(optimizer)
        if (ours := self._ours.get(key)) is not None and ours() is optimizer:
            self._note(optimizer)
        elif (stranger := self._strangers.get(key)) is None or stranger() is not optimizer:
            self._meet(optimizer)

    def look(self, now: float) -> str | None:
        """At each session step: which group holds what the run does not train, in a sentence; None if none does."""
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

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer that steps the run's tensors; note one that steps others as well."""
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
        """No id is used again: the run's own tensors live as long as the session, and no others may be here."""
        return [id(tensor) for optimizer in self.all for group in optimizer.param_groups for tensor in group["params"]]


def _was_skipped(optimizer: Any) -> bool:
    """A gradient scaler leaves it to a fused optimizer to skip its step, and lays the reason down as an attribute.

    Reading it waits for the device, as the scaler itself does with any other optimizer.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class _Watches:
    """Everything that wants to hear of optimizer steps in this process, behind one hook.

    The hook stays once it is there, and a change replaces the tuple: torch walks its hooks while other threads train,
    and must not find that their number has changed. Sessions that are no longer referenced drop out by
    themselves.
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
