"""Layout of a model (its tensors' names, shapes and dtypes) and the plan that cuts it into fragments.

Balanced tensor fragmentation (arXiv 2604.21428, appendix C): whole tensors, largest first, each into the fragment that
is smallest so far. All processes derive the same plan from the same layout; its digest is compared at join.

A fragment is sent and held as ONE flat f32 vector. Each tensor starts at a multiple of `ALIGN` elements and the holes
are zero, so that a quantizer block never spans two tensors.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from .config import MAX_FRAGMENTS, MAX_TENSORS
from .errors import Malformed, SettingError

ALIGN = 128
"""Elements. The quantizer's block size, and the alignment of each tensor inside its fragment's flat vector."""

SMALL_TENSOR = 32
"""Tensors with fewer elements are merged by the weighted mean: a direction in so few dimensions means little."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
          "uint8": 1, "bool": 1}  # fmt: skip
"""Bytes per element of each dtype permitted in a layout."""

TRAINABLE_DTYPES = ("float32", "bfloat16", "float16")

Kind = Literal["trainable", "frozen", "buffer"]
MergeKind = Literal["rda", "mean"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the model. Tied names are one tensor: the first name is `name`, the others are `tied`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "trainable"
    """frozen and buffer (persistent buffers) are static: the run sends them once to each joining learner."""
    merge: MergeKind = "rda"
    """mean for embeddings and tensors tied to one (arXiv 2604.21428, section 3: Avg on the embedding component, RDA on
    all else)."""
    tied: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * DTYPES[self.dtype]

    def describe(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype} {self.kind}"


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, in the model's own order."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def trainable(self) -> tuple[TensorSpec, ...]:
        """The tensors cut into fragments: trainable and not empty."""
        return tuple(t for t in self.tensors if t.kind == "trainable" and t.numel)

    @cached_property
    def static(self) -> tuple[TensorSpec, ...]:
        """The static tensors: frozen parameters and persistent buffers, in layout order."""
        return tuple(t for t in self.tensors if t.kind != "trainable")

    @property
    def static_bytes(self) -> int:
        return sum(t.bytes for t in self.static)

    @property
    def parameters(self) -> int:
        return sum(t.numel for t in self.trainable)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over names, shapes, dtypes, kinds, merge kinds and ties, in order."""
        return hashlib.sha256(json.dumps(self.to_wire(), separators=(",", ":")).encode()).hexdigest()

    def difference(self, other: Layout) -> str:
        """The first difference as a sentence, '' if there is none. `self` is the run's layout, `other` the joiner's."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"the run has {mine.describe()}, you have {theirs.describe()}" + (
                    "" if mine.describe() != theirs.describe() else " (another tie or merge kind)"
                )
        if len(self.tensors) > len(other.tensors):
            return f"you lack {self.tensors[len(other.tensors)].describe()}"
        if len(self.tensors) < len(other.tensors):
            return f"the run has no {other.tensors[len(self.tensors)].describe()}"
        return ""

    def to_wire(self) -> list[list[object]]:
        """Plain lists, as in a Hello and in a checkpoint's manifest."""
        return [[t.name, list(t.shape), t.dtype, t.kind, t.merge, list(t.tied)] for t in self.tensors]

    @staticmethod
    def from_wire(rows: object) -> Layout:
        """The Layout in plain lists; Malformed if any value is invalid."""
        if not isinstance(rows, list) or not rows:
            raise Malformed("layout", "not a list of tensors")
        return Layout.of_tensors(tuple(tensor_from_wire(row) for row in rows))

    @staticmethod
    def of_tensors(tensors: tuple[TensorSpec, ...]) -> Layout:
        """The layout of `tensors`; Malformed if there are too many, a name is repeated, or none is trainable."""
        if len(tensors) > MAX_TENSORS:
            raise Malformed("layout", f"{len(tensors)} tensors; at most {MAX_TENSORS} are permitted")
        names = [name for t in tensors for name in (t.name, *t.tied)]
        if len(set(names)) != len(names):
            raise Malformed("layout", "a name occurs twice")
        if not any(t.kind == "trainable" and t.numel for t in tensors):
            raise Malformed("layout", "no trainable tensor")
        return Layout(tensors)


MAX_ELEMENTS = 2**40


def tensor_from_wire(row: object) -> TensorSpec:
    """The tensor in one row of a layout; Malformed if any value is invalid."""
    if not isinstance(row, list) or len(row) != 6:
        raise Malformed("layout", "a tensor is not six values")
    name, shape, dtype, kind, merge, tied = row
    names = [name, *tied] if isinstance(tied, list) else [None]
    if not all(isinstance(n, str) and 0 < len(n) <= 512 and n.isprintable() for n in names):
        raise Malformed("layout", "a tensor's name")
    if not isinstance(shape, list) or len(shape) > 16:
        raise Malformed("layout", f"shape of {name}")
    if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise Malformed("layout", f"shape of {name}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Malformed("layout", f"dtype of {name}")
    if kind not in ("trainable", "frozen", "buffer") or merge not in ("rda", "mean"):
        raise Malformed("layout", f"kind or merge kind of {name}")
    if kind == "trainable" and dtype not in TRAINABLE_DTYPES:
        raise Malformed("layout", f"{name} is trainable and {dtype}")
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind, merge=merge, tied=tuple(tied))


@dataclass(frozen=True, kw_only=True)
class TensorSpan:
    """Position of one tensor in its fragment's flat vector."""

    tensor: TensorSpec
    offset: int
    """Elements from the start of the flat vector; a multiple of ALIGN."""

    @property
    def stop(self) -> int:
        return self.offset + self.tensor.numel


@dataclass(frozen=True)
class Fragment:
    """One fragment of the plan: its tensors and the length of its flat vector."""

    index: int
    spans: tuple[TensorSpan, ...]
    length: int = field(default=0)
    """Elements of the flat vector, holes included; a multiple of ALIGN."""

    @cached_property
    def parameters(self) -> int:
        """Elements without the holes."""
        return sum(span.tensor.numel for span in self.spans)


@dataclass(frozen=True)
class Plan:
    """The partition of the trainable tensors into P fragments."""

    layout: Layout
    fragments: tuple[Fragment, ...]

    @property
    def P(self) -> int:
        return len(self.fragments)

    @property
    def static_index(self) -> int:
        """The number of the static tensors in messages: one past the last fragment."""
        return self.P

    @cached_property
    def parameters(self) -> int:
        return sum(f.parameters for f in self.fragments)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over the position of each tensor; equal digests mean equal flat vectors."""
        rows = [[[s.tensor.name, s.offset] for s in f.spans] for f in self.fragments]
        return hashlib.sha256((self.layout.fingerprint + json.dumps(rows)).encode()).hexdigest()


def default_fragments(layout: Layout, sync_every: int) -> int:
    """P if the user sets none: one fragment for each of the H steps, but at most one for each tensor."""
    return min(sync_every, len(layout.trainable), MAX_FRAGMENTS)


def balanced_plan(layout: Layout, fragments: int) -> Plan:
    """Cut `layout` into `fragments` parts greedily: largest tensor first, into the smallest part so far.

    Ties are broken by layout order and by fragment number, so that all processes derive the same plan.
    SettingError if there are more fragments than trainable tensors, or fewer than one.
    """
    tensors = layout.trainable
    if not 1 <= fragments <= len(tensors):
        raise SettingError(
            f"{fragments} fragments cannot be cut from {len(tensors)} trainable tensors; "
            f"give --fragments between 1 and {len(tensors)}"
        )
    bins: list[list[int]] = [[] for _ in range(fragments)]
    sizes = [(0, p) for p in range(fragments)]
    heapq.heapify(sizes)
    for i in sorted(range(len(tensors)), key=lambda i: (-tensors[i].bytes, i)):
        size, p = heapq.heappop(sizes)
        bins[p].append(i)
        heapq.heappush(sizes, (size + tensors[i].bytes, p))
    return Plan(layout, tuple(_lay_out(p, [tensors[i] for i in sorted(rows)]) for p, rows in enumerate(bins)))


def _lay_out(index: int, tensors: Sequence[TensorSpec]) -> Fragment:
    spans, offset = [], 0
    for tensor in tensors:
        spans.append(TensorSpan(tensor=tensor, offset=offset))
        offset += math.ceil(tensor.numel / ALIGN) * ALIGN
    return Fragment(index, tuple(spans), offset)


WRAPPER_NAMES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which torch's wrappers hold the wrapped module."""


def strip_wrappers(name: str) -> str:
    """A tensor's name without the parts that torch.compile, DDP and FSDP insert. A guess: a model's own module may have
    such a name, too.

    >>> strip_wrappers("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    parts = [p for p in name.split(".") if p not in WRAPPER_NAMES - {"module"}]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] == "module" else parts)


__all__ = ["ALIGN", "DTYPES", "SMALL_TENSOR", "WRAPPER_NAMES", "Fragment", "Layout", "Plan", "TensorSpan", "TensorSpec",
           "balanced_plan", "default_fragments", "strip_wrappers"]  # fmt: skip
