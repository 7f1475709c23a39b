"""Tasks of the leaderboard: each is measured by a task that exists."""

from typing import get_args

import pytest

from vcsd_eval.accuracy.leaderboard.board_tasks import BOARD_TASKS, TaskName, board_tasks
from vcsd_eval.accuracy.tasks import TASKS


def test_every_task_name_has_a_source():
    assert tuple(BOARD_TASKS) == get_args(TaskName)
    assert {task.source for task in BOARD_TASKS.values()} <= {"", *TASKS}
    assert [name for name, task in BOARD_TASKS.items() if task.low_is_better] == ["output-error", "perplexity"]


def test_unknown_task_is_refused_with_all_names():
    assert board_tasks("passkey,output-error,passkey") == ["passkey", "output-error"]
    with pytest.raises(ValueError, match="task = 'chess': must be one of output-error, perplexity, passkey"):
        board_tasks("passkey,chess")


def test_scores_have_direction_and_range():
    error, recall = BOARD_TASKS["output-error"], BOARD_TASKS["niah-single"]
    assert error.is_better(0.1, 0.2) and recall.is_better(0.2, 0.1)
    assert error.is_possible(7) and not error.is_possible(-0.1)
    assert recall.is_possible(1) and not recall.is_possible(1.01)
    assert BOARD_TASKS["perplexity"].is_possible(-0.1)
