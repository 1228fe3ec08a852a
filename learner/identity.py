"""Identity of a learner or observer: run, name, incarnation and the layout of its model, as sent in its messages."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ..common.config import MESSAGE_BYTES
from ..common.errors import DilocoError, Malformed, SettingError
from ..common.fragments import Layout
from ..common.wire import HEADER_BYTES, MAX_COUNT, Hello, decode, encode, pack_layout, unpack_layout
from .model_layout import Entry


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One membership: a name, and a random incarnation that is unique to this join."""

    run: str
    name: str
    incarnation: int
    layout: Layout
    role: Literal["learner", "observer"] = "learner"
    data_hash: str = ""
    device: str = ""
    host: str = ""
    pid: int = 0
    pin: bool = False
    """Put vectors for the training thread into pinned memory."""

    @property
    def pair(self) -> tuple[str, int]:
        return self.name, self.incarnation

    @cached_property
    def packed_layout(self) -> bytes:
        return pack_layout(self.layout)

    def hello(self) -> Hello:
        """The Hello; sent once both uplinks are proven."""
        return Hello(
            run=self.run, name=self.name, incarnation=self.incarnation, role=self.role,
            fingerprint=self.layout.fingerprint, data_hash=self.data_hash, device=self.device, host=self.host,
            pid=self.pid, bulk_proven=True, payload=self.packed_layout,
        )  # fmt: skip


class Owner:
    """The process that joined. os.fork(), as for a DataLoader's workers, copies a session into another process. There
    its network thread does not run, and the copy must not act: sockets, journal and log are shared with the original.
    """

    def __init__(self, what: str) -> None:
        """what: the member that joined, for the error."""
        self._what, self._pid = what, os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self._pid

    def check(self, call: str) -> None:
        """Raise DilocoError if `call` is made in another process."""
        if not self.here:
            raise DilocoError(
                f"{self._what}: {call} in process {os.getpid()}, a fork of process {self._pid}, which joined; only "
                "that process takes part. Call it there, or join again after the fork"
            )


def layout_to_send(entries: Sequence[Entry]) -> Layout:
    """The layout of the model in `entries`. Raises SettingError if no Hello can carry it. Call before connecting."""
    layout = Layout(tuple(entry.spec() for entry in entries))
    try:
        packed = pack_layout(layout)
        unpack_layout(packed)
    except (Malformed, ValueError, TypeError) as wrong:  # msgpack raises the latter two
        raise SettingError(f"the model cannot take part in a run, which would not understand its {wrong}") from wrong
    if len(packed) > MESSAGE_BYTES - HEADER_BYTES:
        raise SettingError(
            f"names and shapes of the model's {len(layout.tensors)} tensors take {len(packed)} bytes, and a message "
            f"carries {MESSAGE_BYTES - HEADER_BYTES}: give the modules shorter names, or combine small tensors"
        )
    return layout


def identify(
    run: str, name: str, entries: Sequence[Entry], layout: Layout, *, data_hash: str = "", observer: bool = False
) -> Identity:
    """The identity of this process, with the model in `entries`. Raises SettingError if no Hello can carry it."""
    device = next(entry.source.device for entry in entries if entry.kind == "trainable")
    me = Identity(
        run=run,
        name=name,
        incarnation=random.SystemRandom().randrange(1, MAX_COUNT),
        layout=layout,
        role="observer" if observer else "learner",
        data_hash=data_hash,
        device=_plain(torch.cuda.get_device_name(device) if device.type == "cuda" else str(device), 64),
        host=_plain(socket.gethostname(), 255),
        pid=os.getpid(),
        pin=device.type == "cuda" and not observer,
    )
    try:
        decode(encode(me.hello()))
    except (Malformed, ValueError, TypeError) as wrong:
        raise SettingError(f"{name} cannot join run {run}, which would not understand its Hello: {wrong}") from wrong
    return me


def _plain(text: str, most: int) -> str:
    """Printable ASCII of at most `most` characters: a display text must never be why a Hello is rejected."""
    return re.sub(r"[^ -~]", "?", text)[:most]
