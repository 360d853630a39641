"""The Ray cluster a run is on: is there room for its actors, did they start, and does its head still answer?

Ray itself waits for room for ever, and says nothing. Without its head it lets actors work on and, after a
minute, ends the driver's process on the spot, which then cannot say how its run ended.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import warnings
from typing import Any

import ray

from asyncfed.errors import RunError, ScenarioError, WaitingWarning
from asyncfed.problems.problem import Problem

LOOK_EVERY = 2.0  # seconds between two looks whether the head is there
WAIT = "ASYNCFED_WAIT"  # seconds that a run waits for room
_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"  # seconds after which Ray ends the process
_LEAVING = "asyncfed leaves a Ray cluster"
_TELL_AFTER = 3.0  # seconds of waiting
_ROUNDING = 1e-3  # of a core: Ray adds up ten-thousandths


class Head:
    """The process of the cluster that knows who is where (Ray's GCS). Who looks in time gets an error of ours
    before Ray ends this process.
    """

    def __init__(self) -> None:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._patience = float(os.environ.get(_RECONNECT, 60)) / 2
        self._looked = self._answered = time.monotonic()
        self.lost = False

    def look(self) -> None:
        """Every few seconds, however often it is called."""
        now = time.monotonic()
        if now < self._looked + LOOK_EVERY:
            return
        try:
            socket.create_connection(self._address, timeout=LOOK_EVERY).close()
            self._answered = now
        except OSError as error:
            if now > self._answered + self._patience:
                self.lost = True
                host, port = self._address
                raise RunError(
                    f"the head of the Ray cluster at {host}:{port} has not answered for "
                    f"{now - self._answered:.0f} s ({error}); what was recorded so far is kept; "
                    "start the cluster again (`ray start --head`), and go on with `asyncfed resume`"
                ) from None
        self._looked = time.monotonic()


def leave() -> None:
    """Let go of a cluster without a head, before Ray ends this process: in a thread, for it takes 7 s."""
    thread = threading.Thread(target=ray.shutdown, name=_LEAVING)
    thread.start()


def left() -> None:
    """Wait until a cluster that is being left is left."""
    for thread in threading.enumerate():
        if thread.name == _LEAVING:
            thread.join()


def check_shippable(problem: Problem) -> None:
    """Refuse a problem whose functions cannot be sent to actors."""
    try:
        ray.cloudpickle.dumps(problem)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ScenarioError(
            f"problem {problem.name!r} cannot be sent to Ray actors: {error}; let its functions hold plain "
            "values, tensors and networks only, or use backend='local'"
        ) from None


def await_room(actors: int, *, cpus: float, gpus: float) -> None:
    """Until the cluster has room for all actors at once, so that two runs do not take half of it each: `cpus`
    for each, `gpus` in all.
    """
    asked = {"CPU": cpus * actors, "GPU": gpus}
    started, told = time.monotonic(), False
    while True:
        free = ray.available_resources()
        if all(free.get(name, 0.0) >= amount - _ROUNDING for name, amount in asked.items()):
            return
        waited = time.monotonic() - started
        missing = (
            f"the {actors} actors of this run ask for {_amounts(asked)}; the Ray cluster has "
            f"{_amounts(ray.cluster_resources())}, of which {_amounts(free)} are free"
        )
        if waited > _patience():
            raise RunError(
                f"{missing}, after {waited:.0f} s of waiting; end what holds them, or pack more clients "
                f"into an actor (clients_per_actor=K), or wait longer ({WAIT}=3600, in seconds)"
            )
        if waited > _TELL_AFTER and not told:
            told = True
            note = f"waiting for room: {missing}; this run gives up after {_patience():.0f} s"
            warnings.warn(note, WaitingWarning, stacklevel=2)
        time.sleep(0.1)


def await_start(signs: list[Any], head: Head) -> None:
    """Until every actor gave a sign of life. The room may have gone to others, or be in pieces too small."""
    waiting, since = signs, time.monotonic()
    while waiting:
        head.look()
        before = len(waiting)
        _, waiting = ray.wait(waiting, num_returns=before, timeout=LOOK_EVERY)
        if len(waiting) < before:
            since = time.monotonic()
        elif time.monotonic() > since + _patience():
            raise RunError(
                f"{before} of {len(signs)} actors have not started in {_patience():.0f} s; the cluster has "
                f"{_amounts(ray.cluster_resources())}, of which {_amounts(ray.available_resources())} are "
                f"free; see `ray status` and Ray's logs, or wait longer ({WAIT}=3600, in seconds)"
            )


def _patience() -> float:
    text = os.environ.get(WAIT, "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ScenarioError(f"{WAIT} is {text!r}; it must be a number of seconds, at least 0")
    return seconds


def _amounts(resources: dict[str, float]) -> str:
    """As "1.5 CPUs and 2 GPUs"; GPUs only where there are any."""
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    return f"{cpus:.4g} CPUs" + (f" and {gpus:.4g} GPUs" if gpus else "")
