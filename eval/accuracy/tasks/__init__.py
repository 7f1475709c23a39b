"""The tasks by which methods are told apart."""

from eval.accuracy.tasks.copying import PASSKEY, REPETITION
from eval.accuracy.tasks.language import SHAREGPT, WIKITEXT
from eval.accuracy.tasks.qa import SQUAD, TRIVIAQA
from eval.accuracy.tasks.task import Room, Sample, Task

TASKS = {
    "squad": SQUAD,
    "sharegpt": SHAREGPT,
    "wikitext": WIKITEXT,
    "triviaqa": TRIVIAQA,
    "repetition": REPETITION,
    "passkey": PASSKEY,
}

__all__ = ["TASKS", "Room", "Sample", "Task"]
