"""Recomputes keys and values of lost heads by repeating the forwards of the model.

The log has the arguments of every forward on a cache in drives: token IDs and other inputs of the model. They are
repeated one by one on new drives in this process, with the attention method of the original forward. So the same bits
are stored, also with a sparse method: another method would change the keys of later layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from csd_link.replica import Replica, stored_part
from csd_link.replication import ReplicatedDrive
from csd_link.splitting import Deferred
from csd_spec import Attend, AttentionConfig, Command, Completion, Drive, DriveSpec, FlashCounters, KvAppend, SeqCreate
from host_driver.batch import Batch
from host_driver.drive_tier import DriveTier
from host_driver.driver import Driver
from host_driver.hf.cache import KvCache
from host_driver.hf.cache_argument import CACHE_ARGUMENTS

_DROPPED = (*CACHE_ARGUMENTS, "use_cache", "return_dict", "labels")
_BY_TOKEN = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "cache_position", "token_type_ids")


@dataclass(slots=True)
class Forward:
    """Arguments of a forward that added `new` positions to a cache of `past` positions.

    An attention mask (B, past + new) is stored without the columns of earlier forwards.
    """

    given: dict[str, Any]
    past: int
    new: int
    attention: AttentionConfig

    @classmethod
    def of(cls, arguments: dict[str, Any], past: int, new: int, attention: AttentionConfig) -> Forward:
        """Copy the arguments of a forward."""
        replayed = {name: value for name, value in arguments.items() if name not in _DROPPED}
        mask = replayed.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            replayed["attention_mask"] = mask[:, past : past + new]
        # Callers may write the next token into the same memory.
        copied = {
            name: argument.clone() if isinstance(argument, torch.Tensor) else argument
            for name, argument in replayed.items()
        }
        return cls(copied, past, new, attention)

    @property
    def has_mask(self) -> bool:
        """Whether a mask (B, positions) was given; None and masks of other shapes do not count."""
        mask = self.given.get("attention_mask")
        return isinstance(mask, torch.Tensor) and mask.dim() == 2

    def cut(self, new: int) -> Forward:
        """Arguments for the first `new` positions."""
        arguments = dict(self.given)
        for name in _BY_TOKEN:
            if isinstance(value := arguments.get(name), torch.Tensor):
                axis = 1 if name == "inputs_embeds" else -1
                arguments[name] = value.narrow(axis, 0, new)
        return Forward(arguments, self.past, new, self.attention)

    def mask_after(self, before: torch.Tensor | None) -> torch.Tensor:
        """Attention mask (B, past + new); all ones if none was given. `before` is the mask (B, past) or None."""
        mask = self.given.get("attention_mask")
        if mask is None or not self.has_mask:
            tokens = self.given["input_ids" if self.given.get("input_ids") is not None else "inputs_embeds"]
            mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        return mask if before is None else torch.cat([before, mask], dim=1)


class HostDrive:
    """A drive in this process that represents the host: its commands take no simulated time and no link traffic."""

    def __init__(self, device: Drive) -> None:
        self._device, self.name, self.spec = device, "host", device.spec
        self._stored: list[tuple[Command, list[int]]] | None = []  # commands and the handles they create; None: taken

    spec: DriveSpec

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        future = self._device.submit(command, submit_ns)
        if self._stored is not None and isinstance(command, SeqCreate):
            self._stored.append((command, future.result().data[0].tolist()))
        elif self._stored is not None and isinstance(command, KvAppend | Attend):
            self._stored.append((stored_part(command), []))

        def end() -> Completion:
            nothing: dict[str, int] = {}
            done = future.result()
            return replace(done, finish_ns=done.submit_ns, breakdown_ns=nothing, flash=FlashCounters(), link_bytes=0)

        return Deferred(end)

    def take_stored(self, handles: dict[int, int]) -> list[tuple[Command, list[int]]]:
        """Return the commands so far with the host's handles, and stop recording.

        Args:
            handles: Our handles by the host's.
        """
        ours, stored = {theirs: ours for ours, theirs in handles.items()}, self._stored or []
        self._stored = None
        history = list[tuple[Command, list[int]]]()
        for command, created in stored:
            if isinstance(command, KvAppend):
                command = replace(command, seqs=tuple(ours[seq] for seq in command.seqs))
            history.append((command, [ours[handle] for handle in created]))
        return history

    def close(self) -> None:
        self._device.close()


class Replay:
    """Log of a model's forwards, from which lost groups of heads are recomputed.

    Attributes:
        forward_on: Returns the model's `AttachedForward` on a driver's drives; set when the model is attached.
    """

    def __init__(self, groups: Sequence[ReplicatedDrive], make: Callable[[], Drive]) -> None:
        """Set `rebuild` of each group.

        Args:
            groups: Groups of heads in the order of the driver's devices.
            make: Creates a drive in this process.
        """
        self._groups, self._make = groups, make
        self._logs: WeakKeyDictionary[KvCache, list[Forward]] = WeakKeyDictionary()
        self._computing = RLock()
        self._again: dict[int, Replica] = {}  # groups recomputed since the last forward, by index
        self.forward_on: Callable[[Driver], Any] | None = None
        for number, group in enumerate(groups):
            group.rebuild = partial(self._rebuild, number)

    @contextmanager
    def recorded(self, cache: KvCache, arguments: dict[str, Any]) -> Iterator[None]:
        """Run a forward on a cache; it is logged unless it raises."""
        self._forget()
        past = cache.get_seq_length()
        log = self._cropped(cache, past)
        yield
        log.append(Forward.of(arguments, past, cache.get_seq_length() - past, _drives_of(cache).driver.attention))
        self._forget()

    def _forget(self) -> None:
        """Drop recent commands, which the log now covers, and drives computed from a shorter log."""
        self.close()
        for group in self._groups:
            group.forget_recent()

    def close(self) -> None:
        """Close drives that no group uses."""
        for replica in self._again.values():
            replica.device.close()
        self._again.clear()

    def _cropped(self, cache: KvCache, length: int) -> list[Forward]:
        """Log of a cache, cut to the tokens that are still stored."""
        log = self._logs.setdefault(cache, [])
        while log and log[-1].past >= length:
            log.pop()
        if log and log[-1].past + log[-1].new > length:
            log[-1] = log[-1].cut(length - log[-1].past)
        return log

    def _rebuild(self, number: int) -> Replica:
        """Recompute a lost group on a drive in this process."""
        with self._computing, torch.no_grad():  # gradient mode is per thread, and any thread may notice a loss
            if number not in self._again:
                self._again |= self._computed()
            return self._again.pop(number)

    def _computed(self) -> dict[int, Replica]:
        """Recompute all groups from every log."""
        assert self.forward_on is not None, "no model is attached"
        devices = [HostDrive(self._make()) for _ in self._groups]
        replicas = {number: Replica(device, is_temporary=True) for number, device in enumerate(devices)}
        if not self._logs:
            return replicas
        owner = _drives_of(next(iter(self._logs))).driver
        driver = Driver(devices, owner.shape, owner.attention)
        try:
            forward = self.forward_on(driver)
            for cache in list(self._logs):
                if not cache.requests:
                    continue
                again = mask = None
                for logged in self._cropped(cache, cache.get_seq_length()):
                    driver.attention, mask = logged.attention, logged.mask_after(mask)
                    arguments = logged.given | ({"attention_mask": mask} if logged.has_mask else {})
                    out = forward(**arguments, **{forward.cache_name: again}, use_cache=True, return_dict=True)
                    again = out[forward.cache_name]
                lost = _batch_of(cache)
                if again:
                    again.detach()
                batch = _batch_of(again) if again else driver.create(len(cache.valid), cache.kv.max_tokens)
                for replica, ours, theirs in zip(replicas.values(), lost.handles, batch.handles, strict=True):
                    replica.handles |= dict(zip(ours.tolist(), theirs.tolist(), strict=True))
        finally:
            driver.close()
        for replica, device in zip(replicas.values(), devices, strict=True):
            replica.history = device.take_stored(replica.handles)
        return replicas


def _drives_of(cache: KvCache) -> DriveTier:
    drives = cache.kv.drives
    assert drives, "lost heads are recomputed of data in drives"
    return drives


def _batch_of(cache: KvCache) -> Batch:
    """Sequences of a cache, which were created together."""
    with _drives_of(cache).together(cache.requests) as (batch, _):
        return batch
