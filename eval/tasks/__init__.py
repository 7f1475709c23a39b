"""The tasks by which methods are told apart."""

from eval.tasks.copying import PASSKEY, REPETITION
from eval.tasks.language import SHAREGPT, WIKITEXT
from eval.tasks.qa import SQUAD, TRIVIAQA
from eval.tasks.task import Room, Sample, Task

TASKS = {
    "squad": SQUAD,
    "sharegpt": SHAREGPT,
    "wikitext": WIKITEXT,
    "triviaqa": TRIVIAQA,
    "repetition": REPETITION,
    "passkey": PASSKEY,
}

__all__ = ["TASKS", "Room", "Sample", "Task"]
