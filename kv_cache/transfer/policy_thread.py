"""A policy beside a model: it runs in a thread of its own up to a layer's attention, and waits there for the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kv_cache.block_table import PolicyError
from kv_cache.transfer.engine import AttendCall

PATIENCE_S = 5.0  # with a policy whose model has failed; one that goes on computing is left to itself


class IterationAborted(BaseException):
    """The model's forward has failed: the policy goes no further."""


class _Run:
    """An iteration under way. What is left in its queues, whoever was interrupted, is nobody's when it is over."""

    def __init__(self, iteration: Callable[[], None]) -> None:
        self.to_model: SimpleQueue[AttendCall | BaseException | None] = SimpleQueue()
        self.to_policy: SimpleQueue[bool] = SimpleQueue()
        self.abandoned = False
        self.thread = threading.Thread(target=self._carry_out, args=(iteration,), name="policy", daemon=True)

    def _carry_out(self, iteration: Callable[[], None]) -> None:
        try:
            iteration()
            self.to_model.put(None)
        except Exception as error:  # whatever a policy raises is the model's to raise
            self.to_model.put(error)
        except BaseException as error:  # sys.exit() too: a policy does not end the model's process
            self.to_model.put(RuntimeError(f"it ended with {type(error).__name__}"))


class PolicyThread:
    """One iteration: the model reaches layer after layer, the policy attends layer after layer.

    Only one of the two runs at a time.
    """

    def __init__(self) -> None:
        self._run: _Run | None = None
        self._attended = False

    def start(self, iteration: Callable[[], None]) -> None:
        """Begin an iteration."""
        assert self._run is None, "an iteration is under way"
        self._attended, run = False, _Run(iteration)
        self._run = run
        try:
            run.thread.start()
        except RuntimeError:
            self._run = None
            raise

    def attends(self, attention: AttendCall) -> None:
        """Called by the policy: let the model have a layer, and wait until it has attended."""
        run = self._run
        if run is None or run.abandoned or run.thread is not threading.current_thread():
            raise IterationAborted
        run.to_model.put(attention)
        if not run.to_policy.get():
            raise IterationAborted

    def reach(self, layer: int) -> AttendCall:
        """Called by the model at a layer's attention: the one before is over, and the policy has to get here.

        Raises what the policy has raised, and Refused where it attends to something else.
        """
        said = self._next()
        if isinstance(said, AttendCall):
            self._attended = True
            if said.layer != layer:
                raise PolicyError(f"the policy attends to layer {said.layer}, the model is at layer {layer}")
            return said
        self._run = None
        raise said or PolicyError(f"the policy ended its iteration, the model is at layer {layer}")

    def finish(self) -> None:
        """Called by the model after its last layer: let the policy end its iteration."""
        said = self._next()
        if isinstance(said, AttendCall):
            self.abandon()
            raise PolicyError(f"the policy attends to layer {said.layer}, the model has no more")
        self._run = None
        if said:
            raise said

    def abandon(self) -> None:
        """Called by the model when its forward has failed, or was interrupted anywhere in here."""
        run, self._run = self._run, None
        if run is not None:
            run.abandoned = True
            run.to_policy.put(False)
            if run.thread.is_alive():
                run.thread.join(PATIENCE_S)

    def _next(self) -> AttendCall | BaseException | None:
        """What the policy says when it goes on."""
        assert self._run is not None
        if self._attended:
            self._run.to_policy.put(True)
            self._attended = False
        return self._run.to_model.get()
