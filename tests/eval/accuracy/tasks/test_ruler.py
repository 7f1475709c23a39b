"""RULER's tasks: needles are at the right positions, prompts fit, and the metric counts strings.

partner of: eval/accuracy/tasks/haystack.py
"""

import random
import re

import pytest

from vcsd_eval.accuracy.tasks import RULER, Room, Sample
from vcsd_eval.accuracy.tasks.haystack import DEPTHS, NOISE, cyclic, hidden, passage
from vcsd_eval.accuracy.tasks.ruler import HOPS

ROOM = Room(lambda text: list(text.encode()), 2048)


def texts(task, count, seed=0, room=ROOM):
    samples, rule = RULER[task].make(None, room, count, seed)
    return [(sample, bytes(sample.prompt).decode()) for sample in samples], rule


@pytest.mark.parametrize("task", RULER)
def test_prompts_fit_and_repeat_by_seed(task):
    result, rule = texts(task, 6)
    assert "2048 tokens" in rule
    for sample, text in result:
        assert 2048 - 2 * len(NOISE) < len(sample.prompt) + sample.max_tokens <= 2048
        assert all(answer in text for answer in sample.answers)
        assert sample.max_tokens > len(" ".join(sample.answers))
    assert texts(task, 6)[0] == result
    assert texts(task, 6, seed=1)[0] != result


def test_a_single_needle_is_at_its_depth():
    result, _ = texts("niah-single", 5)
    assert [sample.group for sample, _ in result] == [f"depth {depth}" for depth in DEPTHS]
    for (sample, text), depth in zip(result, DEPTHS, strict=True):
        lines = text.split("\n")[1:-1]
        at = next(n for n, line in enumerate(lines) if sample.answers[0] in line)
        assert at == round(depth * (len(lines) - 1))
        key = re.search(r"for (\S+) is: ", lines[at])[1]
        assert f"the special magic number for {key} mentioned in the provided text?" in text
        assert text.endswith(f"The special magic number for {key} mentioned in the provided text is")


def test_multikey_asks_one_of_many_keys():
    result, _ = texts("niah-multikey", 5)
    for sample, text in result:
        needles = dict(re.findall(r"magic numbers for (\S+) is: (\d{7})\.", text))
        asked = re.search(r"The special magic number for (\S+) mentioned in the provided text is$", text)[1]
        assert len(needles) == 4
        assert sample.answers == (needles[asked],)


@pytest.mark.parametrize(("task", "keys"), [("niah-multivalue", 1), ("niah-multiquery", 4)])
def test_multivalue_and_multiquery_ask_several_needles(task, keys):
    result, _ = texts(task, 4)
    for (sample, text), asked in zip(result, (2, 4, 2, 4), strict=True):
        needles = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", text)
        assert len({key for key, _ in needles}) == keys
        assert len(sample.answers) == len(set(sample.answers)) == asked
        assert set(sample.answers) <= {value for _, value in needles}
        assert sample.group.startswith(f"{asked} ")
    ending = result[1][1].split("\n")[-1]
    assert ending.count(", and ") == (2 if keys > 1 else 0)


def test_variables_are_a_chain_in_order():
    result, _ = texts("variable-tracking", 3)
    for (sample, text), hops in zip(result, HOPS, strict=True):
        chain = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", text, re.MULTILINE)
        names = [name for name, _ in chain]
        assert tuple(names) == sample.answers
        assert [source for _, source in chain[1:]] == names[:-1]
        assert text.endswith(f"{hops + 1} variables are assigned the value {chain[0][1]}, they are:")
        solved = re.search(r"they are: ([A-Z ]+)\n\n", text)[1].split()
        assert solved == re.findall(r"^VAR ([A-Z]{3}) = ", text, re.MULTILINE)
        assert len(solved) == hops + 1


@pytest.mark.parametrize(("said", "recall"), [("", 0), (" 12 and 345.", 1), ("it is 345", 0.5), ("1 2 3 4 5", 0)])
def test_recall_is_the_share_of_strings(said, recall):
    task, sample = RULER["niah-multivalue"], Sample([1], ("12", "345"), 9)
    assert task.score(sample, said) == {"recall": recall}
    assert task.over(sample, said) == (recall == 1)


def test_needles_at_same_depth_keep_order():
    assert hidden(["a", "b"], ["x", "y", "z"], [0.5, 0.5, 1.0]) == "a\nx\ny\nb\nz"
    assert hidden(["a", "b"], ["x"], [0.0]) == "x\na\nb"
    assert cyclic(["a", "b"], 5) == ["a", "b", "a", "b", "a"]
    lines = passage(random.Random(3))
    assert len(set(lines)) > 200
    assert lines[0] != passage(random.Random(4))[0]


def test_invalid_ruler_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--max-model-len = 300: too few for this task"):
        RULER["niah-multiquery"].make(None, Room(ROOM.encode, 300), 2, 0)
    for task in RULER.values():
        with pytest.raises(ValueError, match=r"--data = .*: has no effect on this task"):
            task.make(tmp_path / "x", ROOM, 1, 0)
