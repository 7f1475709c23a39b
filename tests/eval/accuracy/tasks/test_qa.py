"""SQuAD and TriviaQA: layouts, prompts and measures.

partner of: eval/accuracy/tasks/files.py, eval/accuracy/tasks/task.py
"""

import copy
import json

import pytest

from vcsd_eval.accuracy.tasks import SQUAD, TRIVIAQA, Room, Sample

ROOM = Room(lambda text: list(text.encode()), 4096)


def squad_file(paragraphs=10):
    return {
        "data": [
            {
                "title": f"Town {n}",
                "paragraphs": [
                    {
                        "context": f"The mayor of town {n} is called Ann{n}.",
                        "qas": [{"question": f"Who leads town {n}?", "answers": [{"text": f"Ann{n}"}]}],
                    }
                ],
            }
            for n in range(paragraphs)
        ]
    }


TRIVIA = {
    "Data": [
        {
            "Question": "Which street?",
            "Answer": {"Value": "Sunset Boulevard", "Aliases": ["Sunset Blvd"]},
            "SearchResults": [{"Title": "A site", "Description": "On Sunset Boulevard ..."}, {"Title": "No more"}],
        }
    ]
}


@pytest.fixture
def write(tmp_path):
    def to_file(content):
        path = tmp_path / "file.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


def prompts(samples):
    return [bytes(sample.prompt).decode() for sample in samples]


def test_shots_precede_question_with_own_backgrounds(write):
    samples, rule = SQUAD.make(write(squad_file()), ROOM, 4, 0)
    assert rule == "4 shots, 0 confusing backgrounds, as 4096 tokens hold"
    for sample, text in zip(samples, prompts(samples), strict=True):
        *shots, told, asked = text.split("\n\n")
        assert len(set(shots)) == 4
        for shot in shots:
            background, question, answer = shot.split("\n")
            name = answer.removeprefix("Answer: ")
            assert background.endswith(f" is called {name}.")
            assert question == f"Question: Who leads town {name.removeprefix('Ann')}?"
            assert name != sample.answers[0]
        assert told.startswith(f"Title: Town {sample.answers[0].removeprefix('Ann')}. Background: The mayor")
        assert asked.startswith("Question: Who leads") and asked.endswith("?\nAnswer:")


def test_shots_on_the_same_background_come_before_others(write):
    file = squad_file(3)
    qas = file["data"][0]["paragraphs"][0]["qas"]
    qas += [{"question": f"Which number has {n}?", "answers": [{"text": f"{n}"}]} for n in range(3)]
    result, _ = SQUAD.make(write(file), Room(ROOM.encode, 4096, 4), 6, 0)
    samples = dict(zip(prompts(result), result, strict=True))
    text = next(text for text, sample in samples.items() if sample.answers == ("Ann0",))
    apart, background, *same, asked = text.split("\n\n")
    assert apart.startswith(("Title: Town 1.", "Title: Town 2."))
    assert background == "Title: Town 0. Background: The mayor of town 0 is called Ann0."
    assert sorted(same) == [f"Question: Which number has {n}?\nAnswer: {n}" for n in range(3)]
    assert asked == "Question: Who leads town 0?\nAnswer:"


def test_confusing_backgrounds_surround_the_right_one(write):
    samples, rule = SQUAD.make(write(squad_file()), Room(ROOM.encode, 4096, 1, 7), 4, 0)
    assert rule.startswith("1 shots, 7 confusing backgrounds")
    places = set()
    for sample, text in zip(samples, prompts(samples), strict=True):
        _, told, _ = text.split("\n\n")
        backgrounds = told.split("\n")
        assert len(set(backgrounds)) == 8
        places.add(next(n for n, each in enumerate(backgrounds) if f"{sample.answers[0]}." in each))
    assert len(places) > 1


def test_small_context_drops_confusions_then_shots(write):
    samples, rule = SQUAD.make(write(squad_file()), Room(ROOM.encode, 400, 2, 7), 3, 0)
    assert rule.startswith("2 shots, 0 confusing")
    assert all(len(sample.prompt) + sample.max_tokens <= 400 for sample in samples)
    _, rule = SQUAD.make(write(squad_file()), Room(ROOM.encode, 300, 2, 7), 3, 0)
    assert rule.startswith("1 shots, 0 confusing")
    with pytest.raises(ValueError, match="--max-model-len = 120: question"):
        SQUAD.make(write(squad_file()), Room(ROOM.encode, 120), 3, 0)


def test_triviaqa_uses_aliases_and_search_results(write):
    (sample,), _ = TRIVIAQA.make(write(TRIVIA), ROOM, 5, 0)
    assert sample.answers == ("Sunset Boulevard", "Sunset Blvd")
    assert prompts([sample]) == [
        "Title: A site. Background: On Sunset Boulevard ...\n\nQuestion: Which street?\nAnswer:",
    ]


@pytest.mark.parametrize(
    ("said", "exact", "f1", "starts"),
    [
        (" The Eiffel Tower\nQuestion", 1, 1, 1),
        (" eiffel tower, in Paris", 0, 2 * 2 / (2 + 4), 1),
        (" a tower", 0, 2 / 3, 0),
        ("", 0, 0, 0),
    ],
)
def test_answer_measures_match_known_values(said, exact, f1, starts):
    sample = Sample([1], ("Eiffel Tower", "La tour"), 64)
    assert SQUAD.score(sample, said) == {"exact_match": exact, "f1": pytest.approx(f1), "starts_with": starts}


def test_answer_ends_at_line_end():
    sample = Sample([1], ("x",), 64)
    assert not SQUAD.over(sample, "\n Ann")
    assert SQUAD.over(sample, " Ann\n")


@pytest.mark.parametrize(
    ("task", "path", "reason"),
    [
        (SQUAD, ("data",), r"file\.json: data: is missing"),
        (SQUAD, ("data", 2, "paragraphs"), r"data\[2\]\.paragraphs: is missing"),
        (SQUAD, ("data", 0, "paragraphs", 0, "context"), r"data\[0\]\.paragraphs\[0\]\.context: is missing"),
        (SQUAD, ("data", 1, "paragraphs", 0, "qas", 0, "answers"), r"qas\[0\]\.answers: is missing"),
        (SQUAD, ("data", 1, "paragraphs", 0, "qas", 0, "answers", 0, "text"), r"answers\[0\]\.text: is missing"),
        (TRIVIAQA, ("Data", 0, "Answer"), r"Data\[0\]\.Answer: is missing"),
        (TRIVIAQA, ("Data", 0, "Answer", "Value"), r"Answer\.Value: is missing"),
    ],
)
def test_a_missing_field_is_named_with_its_record(write, task, path, reason):
    content = copy.deepcopy(squad_file() if task is SQUAD else TRIVIA)
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    with pytest.raises(ValueError, match=reason):
        task.make(write(content), ROOM, 1, 0)


def test_files_of_other_formats_are_refused(write):
    with pytest.raises(ValueError, match=r"file\.json: not JSON, or cut off: .* line 1 column"):
        SQUAD.make(write(json.dumps(squad_file())[:-20]), ROOM, 1, 0)
    with pytest.raises(ValueError, match=r"file\.json: must be an object, got \[\]"):
        SQUAD.make(write("[]"), ROOM, 1, 0)
    with pytest.raises(ValueError, match=r"data: .* at least 1 item"):
        SQUAD.make(write({"data": []}), ROOM, 1, 0)
    with pytest.raises(ValueError, match="recursion limit"):
        SQUAD.make(write("[" * 100_000), ROOM, 1, 0)
    with pytest.raises(ValueError, match=r"Data\[0\]\.SearchResults: must be a valid array, got 5"):
        TRIVIAQA.make(write({"Data": [TRIVIA["Data"][0] | {"SearchResults": 5}]}), ROOM, 1, 0)
    empty = squad_file()
    empty["data"][3]["paragraphs"][0]["qas"][0]["question"] = "  "
    with pytest.raises(ValueError, match=r"data\[3\]\.paragraphs\[0\]\.qas\[0\]\.question: is an empty text"):
        SQUAD.make(write(empty), ROOM, 1, 0)
