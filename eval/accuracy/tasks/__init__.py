"""The tasks by which methods are told apart."""

from vcsd_eval.accuracy.tasks.copying import PASSKEY, REPETITION
from vcsd_eval.accuracy.tasks.language import CODE, SHAREGPT, WIKITEXT
from vcsd_eval.accuracy.tasks.qa import SQUAD, TRIVIAQA
from vcsd_eval.accuracy.tasks.ruler import RULER
from vcsd_eval.accuracy.tasks.task import Room, Sample, Task

TASKS = {
    "squad": SQUAD,
    "sharegpt": SHAREGPT,
    "wikitext": WIKITEXT,
    "code": CODE,
    "triviaqa": TRIVIAQA,
    "repetition": REPETITION,
    "passkey": PASSKEY,
    **RULER,
}

__all__ = ["CODE", "PASSKEY", "REPETITION", "RULER", "SHAREGPT", "SQUAD", "TASKS", "TRIVIAQA", "WIKITEXT"]
__all__ += ["Room", "Sample", "Task"]
