"""Runs a policy along with a model: its thread runs up to a layer's attention and waits there for the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kv_cache.block_table import PolicyError
from kv_cache.transfer.engine import AttendCall

PATIENCE_S = 5.0  # wait for the policy's thread after a failure of the model; afterwards it is abandoned


class IterationAborted(BaseException):
    """The model's forward pass has failed: the policy must stop."""


class _Run:
    """A running iteration. Messages that an interruption leaves in its queues are discarded with it."""

    def __init__(self, iteration: Callable[[], None]) -> None:
        self.to_model: SimpleQueue[AttendCall | BaseException | None] = SimpleQueue()
        self.to_policy: SimpleQueue[bool] = SimpleQueue()
        self.thread = threading.Thread(target=self._carry_out, args=(iteration,), name="policy", daemon=True)

    def _carry_out(self, iteration: Callable[[], None]) -> None:
        try:
            iteration()
            self.to_model.put(None)
        except Exception as error:  # noqa: BLE001 - the model raises it
            self.to_model.put(error)
        except BaseException as error:  # noqa: BLE001 - including sys.exit(): a policy must not end the model's process
            self.to_model.put(RuntimeError(f"the policy ended with {type(error).__name__}"))


class PolicyThread:
    """One iteration: model and policy proceed layer by layer.

    Only one of the two runs at a time.
    """

    def __init__(self) -> None:
        self._run: _Run | None = None
        self._attended = False

    def start(self, iteration: Callable[[], None]) -> None:
        """Start an iteration."""
        assert self._run is None, "an iteration is in flight"
        self._attended, run = False, _Run(iteration)
        self._run = run
        try:
            run.thread.start()
        except RuntimeError:
            self._run = None
            raise

    def attend_layer(self, attention: AttendCall) -> None:
        """Called by the policy: pass a layer to the model, and wait until the model has attended."""
        run = self._run
        if run is None or run.thread is not threading.current_thread():  # its iteration was abandoned
            raise IterationAborted
        run.to_model.put(attention)
        if not run.to_policy.get():
            raise IterationAborted

    def enter_layer(self, layer: int) -> AttendCall:
        """Called by the model at a layer's attention: resume the policy until it attends to this layer.

        Raises:
            PolicyError: The policy attends to another layer. Exceptions of the policy are raised unchanged.
        """
        message = self._next()
        if isinstance(message, AttendCall):
            self._attended = True
            if message.layer != layer:
                raise PolicyError(f"the policy attends to layer {message.layer}, the model is at layer {layer}")
            return message
        self._run = None
        raise message or PolicyError(f"the policy ended its iteration, the model is at layer {layer}")

    def finish(self) -> None:
        """Called by the model after its last layer: run the policy to the end of its iteration."""
        message = self._next()
        if isinstance(message, AttendCall):
            self.abandon()
            raise PolicyError(f"the policy attends to layer {message.layer}, the model has ended")
        self._run = None
        if message:
            raise message

    def abandon(self) -> None:
        """Called by the model when its forward pass failed or was interrupted."""
        run, self._run = self._run, None
        if run is not None:
            run.to_policy.put(False)
            if run.thread.is_alive():
                run.thread.join(PATIENCE_S)

    def _next(self) -> AttendCall | BaseException | None:
        """Resume the policy and wait for its next message."""
        assert self._run is not None
        if self._attended:
            self._run.to_policy.put(True)
            self._attended = False
        return self._run.to_model.get()
