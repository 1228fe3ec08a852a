"""Replica of the model in one learner: fragments are captured from it and written into it, always in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..common.errors import Malformed
from ..common.fragments import Fragment, Plan
from .model_layout import DTYPE_OF, Entry, inventory, layout_of

__all__ = ["Replica", "anchor", "close_holes", "layout_of", "outside_inference_mode"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `function` makes and writes ordinary tensors, even if the training script calls it inside
    torch.inference_mode(). Tensors made there cannot be written anywhere else, not even by the network thread.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():  # entering a mode takes 30 us
            return function(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def _views(fragment: Fragment, flat: Tensor) -> list[Tensor]:
    """The tensors of a fragment inside its flat vector, each in its own shape."""
    return [flat[span.offset : span.stop].view(span.tensor.shape) for span in fragment.spans]


def close_holes(fragment: Fragment, flat: Tensor) -> None:
    """Zero the gaps between the tensors of a flat vector; a reused buffer may hold any values there."""
    ends = [span.offset for span in fragment.spans[1:]] + [fragment.length]
    for span, end in zip(fragment.spans, ends, strict=True):
        flat[span.stop : end].zero_()


def anchor(fragment: Fragment, public: Tensor) -> Tensor:
    """The public vector, cast through the parameters' dtypes: what a model holds after it adopted `public`."""
    if all(span.tensor.dtype == "float32" for span in fragment.spans):
        return public
    out = public.clone()
    for span, view in zip(fragment.spans, _views(fragment, out), strict=True):
        view.copy_(view.to(DTYPE_OF[span.tensor.dtype]))
    return out


def cuda_event(device: torch.device) -> torch.cuda.Event:
    """An event after everything that this thread has queued on `device` so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Replica:
    """The tensors of one model, addressed by the fragments of `plan`.

    Only the training thread may call methods that read or write the model. With masters (bf16 parameters that follow
    f32 tensors of the optimizer), fragments consist of the masters; the parameters are updated
    when a fragment is adopted.
    """

    def __init__(self, model: nn.Module, plan: Plan, masters: Mapping[str, Tensor] | None = None) -> None:
        self.model, self.plan = model, plan
        self._entries = {entry.name: entry for entry in inventory(model, masters=masters)}
        self._made_in_inference = any(entry.tensor.is_inference() for entry in self._entries.values())

    def all_entries(self) -> list[Entry]:
        """Trained and static tensors, in the model's order."""
        return list(self._entries.values())

    def entries(self, fragment: Fragment) -> list[Entry]:
        return [self._entries[span.tensor.name] for span in fragment.spans]

    def source(self, name: str) -> Tensor:
        """The tensor that holds the training state of `name`: its master, if it has one."""
        return self._entries[name].source.detach()

    def sources(self, fragment: Fragment) -> list[Tensor]:
        """The tensors that hold the fragment's training state: masters, if there are any."""
        return [entry.source.detach() for entry in self.entries(fragment)]

    @cached_property
    def on_cuda(self) -> bool:
        return any(entry.source.is_cuda for entry in self._entries.values())

    # --- out of the model --------------------------------------------------------------------------------------------
    def new_buffer(self, length: int) -> Tensor:
        """Host memory for a flat vector; pinned where the model is on a CUDA device. Contents arbitrary."""
        return torch.empty(length, dtype=torch.float32, device="cpu", pin_memory=self.on_cuda)

    @torch.no_grad()
    def capture(self, fragment: Fragment, out: Tensor) -> tuple[torch.cuda.Event, ...]:
        """Copy the fragment into the host buffer `out` (flat f32; its holes are not written).

        On a CUDA device the copy is only queued, ahead of the next inner step: wait for the returned events, in
        another thread, before reading `out`.
        """
        sources = self.sources(fragment)
        torch._foreach_copy_(_views(fragment, out), sources, non_blocking=self.on_cuda)
        return tuple(cuda_event(device) for device in {source.device for source in sources if source.is_cuda})

    def vector(self, fragment: Fragment) -> Tensor:
        """The fragment's current values as a new flat f32 host vector, holes zero. Waits for the device."""
        out = torch.zeros(fragment.length, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            torch._foreach_copy_(_views(fragment, out), self.sources(fragment))
        return out

    # --- into the model ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def overwrite(self, fragment: Fragment, public: Tensor) -> None:
        """theta <- Theta, the rule of arXiv 2604.21428. `public` must not be written again."""
        self._write(fragment, _views(fragment, public))

    @torch.no_grad()
    def rebase(self, fragment: Fragment, public: Tensor, captured: Tensor) -> None:
        """theta <- Theta + (theta - theta at the capture): a contributor keeps its progress since."""
        values = []
        for new, old, now in zip(
            _views(fragment, public), _views(fragment, captured), self.sources(fragment), strict=True
        ):
            since = now.float() - old.to(now.device, non_blocking=self.on_cuda)
            values.append(since.add_(new.to(now.device, non_blocking=self.on_cuda)))
        self._write(fragment, values)

    @torch.no_grad()
    def mix(self, fragment: Fragment, public: Tensor, alpha: float) -> None:
        """theta <- alpha theta + (1 - alpha) Theta (arXiv 2604.21428, D.1; Streaming DiLoCo's blend)."""
        values = [
            now.float() * alpha + new.to(now.device, non_blocking=self.on_cuda) * (1 - alpha)
            for new, now in zip(_views(fragment, public), self.sources(fragment), strict=True)
        ]
        self._write(fragment, values)

    def _write(self, fragment: Fragment, values: Sequence[Tensor]) -> None:
        entries = self.entries(fragment)
        with self._writable():
            torch._foreach_copy_(self.sources(fragment), list(values), non_blocking=self.on_cuda)
            followers = [entry for entry in entries if entry.master is not None]
            if followers:
                sources = [entry.source.detach() for entry in followers]
                torch._foreach_copy_([entry.tensor.detach() for entry in followers], sources)

    def _writable(self) -> AbstractContextManager[object]:
        """Tensors that were made in torch.inference_mode() can only be written there."""
        return torch.inference_mode() if self._made_in_inference else nullcontext()

    # --- static tensors ----------------------------------------------------------------------------------------------
    def static_bytes(self) -> bytes:
        """Frozen parameters and persistent buffers, their bytes (little endian) concatenated in layout order."""
        parts = [self._entries[spec.name].tensor.detach().cpu() for spec in self.plan.layout.static if spec.numel]
        return b"".join(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)

    def static_tensors(self) -> list[Tensor]:
        """Frozen parameters and persistent buffers, in layout order."""
        return [self._entries[spec.name].tensor.detach() for spec in self.plan.layout.static]

    @torch.no_grad()
    def load_static(self, content: bytes | memoryview, keep: Collection[str] = ()) -> list[str]:
        """Write the static part into the model, except for the names in `keep`. Returns the names of the tensors that
        held other values before. Raises Malformed, and writes nothing, if the content has the wrong size.
        """
        if len(content) != self.plan.layout.static_bytes:
            raise Malformed("size", f"{len(content)} bytes of static values, not {self.plan.layout.static_bytes}")
        offset, replaced = 0, []
        for spec in self.plan.layout.static:
            if spec.numel and spec.name not in keep:
                part = torch.frombuffer(bytearray(content[offset : offset + spec.bytes]), dtype=DTYPE_OF[spec.dtype])
                tensor, part = self._entries[spec.name].tensor, part.view(spec.shape)
                if not torch.equal(tensor.cpu(), part):
                    replaced.append(spec.name)
                with self._writable():
                    tensor.copy_(part)
            offset += spec.bytes
        return replaced

    # --- the whole model ---------------------------------------------------------------------------------------------
    @outside_inference_mode
    @torch.no_grad()
    def keep_parameters(self) -> list[Tensor]:
        """Copies of all trainable parameters (not of masters), for `put_back`."""
        return [entry.tensor.detach().clone() for entry in self._trainable()]

    @outside_inference_mode
    @torch.no_grad()
    def put_back(self, kept: Sequence[Tensor]) -> None:
        """Restore the parameters that `keep_parameters` copied, bit for bit."""
        with self._writable():
            for entry, values in zip(self._trainable(), kept, strict=True):
                entry.tensor.copy_(values)

    @outside_inference_mode
    @torch.no_grad()
    def show(self, vectors: Sequence[Tensor]) -> None:
        """Write all public fragments into the parameters, not into masters: for evaluation, not for training."""
        with self._writable():
            for fragment, vector in zip(self.plan.fragments, vectors, strict=True):
                for entry, view in zip(self.entries(fragment), _views(fragment, vector), strict=True):
                    entry.tensor.copy_(view)

    def save(self, path: Path) -> None:
        """All tensors as a safetensors file; a tied tensor has its first name, and the metadata has the others."""
        tensors = {e.name: e.source.detach().cpu().contiguous().clone() for e in self._entries.values()}
        tied = {name: e.name for e in self._entries.values() for name in e.names[1:]}
        save_file(tensors, path, metadata={"format": "pt", **tied})

    def _trainable(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.kind == "trainable"]
