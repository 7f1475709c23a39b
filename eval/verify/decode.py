"""A decode of the bundled model, to be repeated while faults happen to its drives."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from vcsd.generate import Inputs, generate
from vcsd.loading import CHECKPOINT, PROMPT, encode, load
from vcsd.session import Session, attach


@dataclass(frozen=True, slots=True)
class ReferenceDecode:
    """A decode, and its tokens without faults.

    Attributes:
        options: Options of `attach`, to be completed with the drives under test.
        expected: (1, tokens).
    """

    model: PreTrainedModel
    inputs: Inputs
    options: dict[str, Any]
    expected: torch.Tensor

    @classmethod
    def of(cls, tokens: int, seed: int, drives: int, **options: Any) -> ReferenceDecode:
        """Decode `tokens` tokens in `drives` drives of this process. `options`: others of `attach`."""
        model, tokenizer = load(CHECKPOINT)
        inputs = encode(model, tokenizer, PROMPT.read_text(encoding="utf-8"), 1, tokens, seed)
        options |= {"method": "sparf", "compression": 8, "drives": drives}
        with attach(model, **options):
            expected, _ = generate(model, inputs, tokens, None)
        return cls(model, inputs, options, expected)

    @property
    def tokens(self) -> int:
        """Length of the decode."""
        return self.expected.shape[1]

    def repeat(self) -> Counter[str]:
        """Decode again with the attached drives; counts of `lost` tokens, and of `wrong` ones."""
        tokens, _ = generate(self.model, self.inputs, self.tokens, None)
        wrong = int((tokens != self.expected[:, : tokens.shape[1]]).sum())
        return Counter(lost=self.tokens - tokens.shape[1], wrong=wrong)

    def in_drives(self, **options: Any) -> AbstractContextManager[Session]:
        """Attach the model to the drives under test until the block ends."""
        return attach(self.model, **self.options | options)
