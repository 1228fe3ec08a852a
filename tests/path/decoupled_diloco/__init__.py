"""Decoupled DiLoCo: train one model on compute that is far apart, unequal and unreliable.

The public API. Names are imported on first use, so that the broker, which needs no torch, never loads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .common.errors import DilocoError
    from .learner.session import Session, join

__version__ = "0.1.0"
__all__ = ["DilocoError", "Session", "__version__", "join"]

_MODULES = {"join": ".learner.session", "Session": ".learner.session", "DilocoError": ".common.errors"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
