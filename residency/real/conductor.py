"""A policy beside a model: it runs in a thread of its own up to a layer's attention, and waits there for the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from residency.table import Refused
from residency.turn import Attention


class Abandoned(BaseException):
    """The model's forward has failed: the policy goes no further."""


class Conductor:
    """One turn: the model reaches layer after layer, the policy attends layer after layer.

    Only one of the two runs at a time.
    """

    def __init__(self) -> None:
        self._to_model: SimpleQueue[Attention | BaseException | None] = SimpleQueue()
        self._to_policy: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._attended: Attention | None = None

    def start(self, turn: Callable[[], None]) -> None:
        """Begin a turn."""
        assert self._thread is None, "a turn is under way"

        def run() -> None:
            try:
                turn()
                self._to_model.put(None)
            except BaseException as error:  # whatever a policy raises is the model's to raise
                self._to_model.put(error)

        self._thread = threading.Thread(target=run, name="policy", daemon=True)
        self._thread.start()

    def attends(self, attention: Attention) -> None:
        """Called by the policy: let the model have a layer, and wait until it has attended."""
        self._to_model.put(attention)
        if not self._to_policy.get():
            raise Abandoned

    def reach(self, layer: int) -> Attention:
        """Called by the model at a layer's attention: the one before is over, and the policy has to get here.

        Raises what the policy has raised, and Refused where it attends to something else.
        """
        if self._attended is not None:
            self._to_policy.put(True)
        said = self._to_model.get()
        if isinstance(said, Attention):
            self._attended = said
            if said.layer != layer:
                raise Refused(f"the policy attends to layer {said.layer}, the model is at layer {layer}")
            return said
        self._join()
        raise said or Refused(f"the policy ended its turn, the model is at layer {layer}")

    def finish(self) -> None:
        """Called by the model after its last layer: let the policy end its turn."""
        if self._attended is not None:
            self._attended = None
            self._to_policy.put(True)
        said = self._to_model.get()
        if isinstance(said, Attention):
            self._attended = said
            self.abandon()
            raise Refused(f"the policy attends to layer {said.layer}, the model has no more")
        self._join()
        if said:
            raise said

    def abandon(self) -> None:
        """Called by the model when its forward has failed."""
        if self._thread is None:
            return
        if self._attended is not None:
            self._to_policy.put(False)
        while isinstance(self._to_model.get(), Attention):
            self._to_policy.put(False)
        self._join()

    def _join(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = self._attended = None
