"""Network thread of a learner or observer: owns its four sockets, passes messages between them and the protocol core,
and supplies the time.

It is a daemon thread, so it never keeps a program alive. The session's next call raises any failure of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch
import zmq

from ..common.auth_keys import held_key
from ..common.config import LearnerConfig
from ..common.errors import DilocoError
from ..common.fragments import Plan
from ..common.log import get_logger
from ..common.sockets import (
    CONTROL_MESSAGES,
    Address,
    BrokerConnection,
    PublishSocket,
    SubscribeSocket,
    Waker,
    check_sockets,
    refusal_of,
    unresolved_of,
)
from ..common.system_limits import limit_of
from ..common.wire import Plane, beat_topic, prefix
from .alive_and_goodbye import ByteCounts
from .core import LearnerCore
from .identity import Identity
from .join_protocol import SeedSender, SeedSource
from .mailbox import Mailbox

log = get_logger("learner")

UP_MESSAGES = 32
"""Most chunks that wait in the bulk uplink's socket; further ones wait in the core."""
DOWN_MESSAGES = 256
"""Most chunks that wait in the bulk downlink while this thread decodes: 16 fetched ones, the rest updates."""
POLL_MS = 100
"""The loop's longest sleep, and the resolution of its timers."""
BUSY_MS = 5
"""The same while bulk messages wait for room in the socket, which raises no event."""
BATCH = 64
"""Most messages read from one plane before the other is read."""
SEND_BATCH = 16
"""Most bulk messages sent in one turn of the loop."""


class SessionLink(Protocol):
    """What a session requires of its connection to the run: a Link, or a simulator's substitute."""

    config: LearnerConfig
    me: Identity
    mailbox: Mailbox

    def wake(self) -> None:
        """The training thread has put something into the mailbox."""

    def leave(self, reason: str) -> None:
        """Say goodbye and end."""

    def abandon(self) -> None:
        """End at once, without a goodbye."""

    def join_thread(self, seconds: float) -> bool:
        """Wait for the end, at most `seconds`; False if it has not come."""


class Link:
    """Connects to the broker, and delivers the public model and the syncer's calls to the mailbox until it leaves."""

    def __init__(
        self,
        config: LearnerConfig,
        me: Identity,
        mailbox: Mailbox,
        source: Callable[[Plan], SeedSource] | None = None,
    ) -> None:
        """source: makes the model that version 0 is read from, for a learner that the syncer chooses to send it.

        Raises LimitReached if this process may not open its sockets or start its threads.
        """
        check_sockets(f"{me.role} {me.name}", 4, threads=2)
        self.config, self.me, self.mailbox = config, me, mailbox
        self._key = held_key(config.key)
        self.address = Address.parse(config.broker)
        self.core = LearnerCore(config, me, mailbox, SeedSender(me, source))
        self._waker = Waker()
        self._wants_keyframes = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"diloco-link-{me.name}", daemon=True)

    # --- for the training thread -------------------------------------------------------------------------------------
    def start(self) -> None:
        self.mailbox.progress_at = time.monotonic()
        self._thread.start()

    def wake(self) -> None:
        """Something waits in the mailbox."""
        self._waker.wake()

    def leave(self, reason: str) -> None:
        """Say goodbye and end. The first reason counts."""
        self.mailbox.leaving = self.mailbox.leaving or reason
        self._waker.wake()

    def abandon(self) -> None:
        """End at once, without a goodbye."""
        self._abandoned = True
        self._waker.wake()

    def join_thread(self, seconds: float) -> bool:
        """Wait for the thread's end, at most `seconds`; False if it is still alive."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        """Serve until the end. However this thread ends, the mailbox reports it to the training thread."""
        try:
            _one_thread_for_torch()
            torch.set_flush_denormal(False)  # threads inherit it, and all processes must compute the same bits
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
            try:
                self._serve(context)
            finally:
                context.destroy()
        except DilocoError as failure:
            self.mailbox.fail(failure)
        except BaseException as failure:
            reason = limit_of(failure)
            error = DilocoError(
                f"the link of {self.me.name} to {self.address} failed: {type(failure).__name__}: {failure}"
                + (f" ({reason})" if reason else "")
            )
            error.__cause__ = failure
            self.mailbox.fail(error)
            log.exception("link_failed")
        finally:
            if not (self.core.over or self._abandoned):  # the first failure counts
                sentence = f"the network thread of {self.me.name}, connected to {self.address}, has ended"
                self.mailbox.fail(DilocoError(sentence))
            self._waker.close()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open the sockets, loop, close them. Their linger time lets messages that were sent go out."""
        down = {
            Plane.CONTROL: SubscribeSocket(
                context, self.address.control_out, hwm_messages=CONTROL_MESSAGES, key=self._key,
                on_malformed=lambda _, error: self.core.reject(error),
            ),
            Plane.BULK: SubscribeSocket(
                context, self.address.bulk_out, hwm_messages=DOWN_MESSAGES, key=self._key,
                on_malformed=lambda _, error: self.core.reject(error),
            ),
        }  # fmt: skip
        up = {
            Plane.CONTROL: PublishSocket(
                context, self.address.control_in, hwm_messages=CONTROL_MESSAGES, key=self._key
            ),
            Plane.BULK: PublishSocket(context, self.address.bulk_in, hwm_messages=UP_MESSAGES, key=self._key),
        }
        poller = zmq.Poller()
        for socket in [*(d.socket for d in down.values()), *(u.socket for u in up.values()), self._waker.socket]:
            poller.register(socket, zmq.POLLIN)
        self._subscribe(down)
        try:
            while not self.core.over and not self._abandoned:
                poller.poll(BUSY_MS if self.core.busy else POLL_MS)
                self._waker.clear()
                self._check_connections([*down.values(), *up.values()])
                self._receive(down)
                self._send(up, down)
        finally:
            for downlink in down.values():
                downlink.close()
            for uplink in up.values():
                uplink.close()

    def _check_connections(self, connections: list[BrokerConnection]) -> None:
        """Note whether the broker rejects this learner or cannot be found, and log it when that changes."""
        for connection in connections:
            connection.look()
        refusal = refusal_of(connections, self.config.broker, self.config.key)
        problem = refusal or unresolved_of(connections)
        if problem and problem != self.mailbox.refusal:
            log.warning("broker_refuses" if refusal else "host_unresolved", learner=self.me.name, sentence=problem)
        self.mailbox.refusal = problem

    def _subscribe(self, down: dict[Plane, SubscribeSocket]) -> None:
        run = self.config.run
        down[Plane.CONTROL].subscribe(beat_topic(run))
        down[Plane.CONTROL].subscribe(prefix(run, "call"))
        down[Plane.CONTROL].subscribe(prefix(run, "welcome", self.core.me.name))
        down[Plane.BULK].subscribe(beat_topic(run))
        down[Plane.BULK].subscribe(prefix(run, "fragment"))

    def _receive(self, down: dict[Plane, SubscribeSocket]) -> None:
        for plane, downlink in down.items():
            for _ in range(BATCH):
                message = downlink.receive()
                if message is None:
                    break
                self.core.receive(message, plane, time.monotonic())
        model = self.core.public_model
        wants = (
            model is not None and model.wants_keyframes
        )  # a subscriber receives all keyframes, also those for others
        if wants != self._wants_keyframes:
            self._wants_keyframes = wants
            change = down[Plane.BULK].subscribe if wants else down[Plane.BULK].unsubscribe
            change(prefix(self.config.run, "keyframe"))

    def _send(self, up: dict[Plane, PublishSocket], down: dict[Plane, SubscribeSocket]) -> None:
        core, now = self.core, time.monotonic()
        for uplink in up.values():
            uplink.read_subscriptions()
        traffic = ByteCounts(
            bytes_up=sum(u.bytes_sent for u in up.values()),
            bytes_down=sum(d.bytes_received for d in down.values()),
            gaps=sum(d.gaps for d in down.values()),
        )
        proven = {"control_proven": up[Plane.CONTROL].proven, "bulk_proven": up[Plane.BULK].proven}
        for message in core.tick(now, **proven, traffic=traffic):
            if up[Plane.CONTROL].send(message):
                core.sent(message, now)
        for _ in range(SEND_BATCH):
            bulk = core.next_bulk()
            if bulk is None:
                break
            if not up[Plane.BULK].send(bulk):
                core.unsent(bulk)
                break
            core.sent(bulk, time.monotonic())


def _one_thread_for_torch() -> None:
    """Run the calling thread's torch operations on that thread alone, so that they do not compete with training.

    OpenMP keeps this number per thread, but torch also records it for threads that start later. So a short-lived thread
    sets the old number again.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(others,), daemon=True)
    restore.start()
    restore.join()
