"""The full emulator in timing-only mode: sequences of any lengths on one drive, dense decode steps layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from csd_spec import DriveSpec, ModelShape, SparFParams
from vcsd_eval.papers.instinfer.simulate import TimedDrive

LAYOUT, METHOD = "plain", "dense"
OLD_SEQUENCES, OLD_TOKENS = 8, 4096  # at most, stored and dropped before: drives do not begin at the same lane
ALL = SparFParams(r=1, k=1, l=1)  # a budget that dense attention does not use


class EmulatedDrive(TimedDrive):
    """One drive with KV heads of sequences.

    Args:
        spec: The drive.
        shape: Layers, KV heads and query heads that this drive has.
        context: Tokens of the longest sequence.
        seed: Draws the sequences that the drive has stored and dropped before.
    """

    def __init__(self, spec: DriveSpec, shape: ModelShape, context: int, seed: int) -> None:
        super().__init__(spec, shape, context, LAYOUT)
        self.schedule = spec.engine.schedule
        self.handles: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        generator = np.random.default_rng(seed)
        old = generator.integers(1, OLD_TOKENS, generator.integers(1, OLD_SEQUENCES, endpoint=True))
        self.hold({-1 - number: int(tokens) for number, tokens in enumerate(old)})
        self.hold({})

    def hold(self, tokens: Mapping[int, int]) -> None:
        """Store exactly these sequences, by number: append to those that grow, create and free the others.

        One that would get shorter is another one.
        """
        gone = [number for number in self.handles if tokens.get(number, 0) < self.tokens[number]]
        if gone:
            self.ftl.free([self.handles.pop(number) for number in gone], self.ftl.timing.idle_ns())
        prompts = [number for number in tokens if number not in self.handles]
        for number in prompts:  # one after the other, as they are prefilled
            self.handles[number] = self.ftl.create(1, self.shape.layers, self.shape.kv_heads, self.layout)[0]
            self._append({number: tokens[number]})
        answers = {number: count - self.tokens[number] for number, count in tokens.items() if number not in prompts}
        for step in range(max(answers.values(), default=0)):  # a page's place depends on when it is full
            self._append({number: 1 for number, count in answers.items() if count > step})
        self.tokens = dict(tokens)

    def _append(self, new: Mapping[int, int]) -> None:
        """Add tokens to sequences, by number, in all layers."""
        handles, counts = [self.handles[number] for number in new], np.array(list(new.values()))
        for layer in range(self.shape.layers if new else 0):
            self.ftl.append(handles, layer, counts, None, None, self.ftl.timing.idle_ns())

    def layers_s(self) -> list[float]:
        """Seconds of a decode step of all sequences, for each layer."""
        watches = self.watches([*self.handles.values()], METHOD, ALL, 1.0, self.schedule)
        return [(watch.now_ns - watch.start_ns) / 1e9 for watch in watches]
