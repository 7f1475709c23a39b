"""Files of claims: their content, and a one-line error for each defect."""

import csv
from dataclasses import replace

import pytest

from vcsd_eval.papers.claims import COLUMNS, FOLDER, Claim, ClaimKind, Source, claims_of, printed, read_claims
from vcsd_eval.papers.compare import PAPERS, load
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import judge

ROW = {"id": "t1a", "page": "Table 1", "what": "tokens/s", "value": "1.5", "unit": "1/s"}
PREDICTED = ROW | {"kind": "predicted", "source": "formula"}


def write(folder, *rows, columns=COLUMNS):
    path = folder / "claims.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("name", PAPERS)
def test_claims_of_every_paper_are_valid(name):
    claims = claims_of(name)
    assert printed(name) == {claim.id: claim.value for claim in claims}
    assert {claim.kind for claim in claims} <= set(ClaimKind) and len(claims) >= 19


def test_every_claims_file_belongs_to_a_paper():
    assert {path.parent.name for path in FOLDER.glob("*/claims.csv")} == {name.replace("-", "_") for name in PAPERS}


def test_new_claim_is_one_row(tmp_path):
    """An input is taken as printed, a claim that is not determined may lack a value of ours; nothing else changes."""
    paper = load("tierkv")
    path = tmp_path / "claims.csv"
    added = '\nt26,3.1,"64",blocks of a request,64,x,,input,,\nt27,3.2,,stall,5,ms,,not determined,,of what?\n'
    path.write_text((FOLDER / "tierkv" / "claims.csv").read_text().rstrip("\n") + added)
    evaluation = paper.evaluate(MachineOptions(), Simulated(), False)
    before, after = (judge(each, evaluation)["rows"] for each in (paper, replace(paper, claims=read_claims(path))))
    assert after[:-2] == before
    assert [(row["id"], row["quote"], row["ours"]) for row in after[-2:]] == [("t26", "64", 64), ("t27", None, None)]


def test_read_claims_one_row(tmp_path):
    row = PREDICTED | {"quote": '1.5 "K", up', "bound": "<", "kind": "contradicts", "reason": "t2 gives 2"}
    (claim,) = read_claims(write(tmp_path, row))
    assert claim == Claim(
        id="t1a",
        page="Table 1",
        quote='1.5 "K", up',
        what="tokens/s",
        value=1.5,
        unit="1/s",
        bound="<",
        kind=ClaimKind.CONTRADICTS,
        source=Source.FORMULA,
        reason="t2 gives 2",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "t1a"}, "id t1a is already used in line 2: ids must be unique"),
        ({"id": "T 1"}, "id: String should match pattern"),
        ({"page": ""}, "page: is missing"),
        ({"value": "many"}, "value: must be a valid number"),
        ({"value": "nan"}, "value: must be a finite number"),
        ({"bound": "<="}, "bound: must be '', '<' or '>', got '<='"),
        (
            {"kind": "guessed"},
            "kind: must be 'input', 'calibrated', 'derived', 'predicted', 'contradicts', 'not determined' ",
        ),
        ({"source": "oracle"}, "source"),
        ({"source": ""}, "source: must be one of engine, formula, count for kind = predicted"),
        ({"kind": "contradicts"}, "reason: must not be empty for kind = contradicts"),
        ({"kind": "not modelled"}, "reason: must not be empty for kind = not modelled"),
        ({"reason": "why not"}, "reason: only contradicts, not determined, not modelled have one"),
    ],
)
def test_read_claims_invalid_row_names_file_and_line(tmp_path, change, message):
    path = write(tmp_path, PREDICTED, PREDICTED | {"id": "t1b"} | change)
    with pytest.raises(ValueError) as caught:
        read_claims(path)
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_claims_other_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"claims.csv:1: columns are id,page, must be id,page,quote"):
        read_claims(write(tmp_path, {"id": "t1a"}, columns=("id", "page")))
    path = write(tmp_path, PREDICTED)
    path.write_text(path.read_text() + "t1b,Table 1\n")
    with pytest.raises(ValueError, match=r"claims.csv:3: 2 cells, must be 10"):
        read_claims(path)
    path.write_text(path.read_text().replace("t1b,", '"t1b"b,'))
    with pytest.raises(ValueError, match=r"claims.csv:3: "):
        read_claims(path)


def test_printed_bound_is_met_or_missed():
    below, above = (Claim(**fields(bound=bound, value=value)) for bound, value in (("<", 1), (">", 98)))
    assert below.error_percent(0) == 0
    assert below.error_percent(3) == pytest.approx(200)
    assert (above.error_percent(98.8), above.is_off(98.8)) == (0, False)
    assert (above.error_percent(49), above.is_off(49)) == (pytest.approx(-50), True)


def test_error_of_a_printed_zero_is_in_percent_of_one():
    none = Claim(**fields(value=0))
    assert (none.error_percent(0), none.error_percent(0.5)) == (0, pytest.approx(50))
    assert (none.is_off(0), none.is_off(2), none.is_off(4)) == (False, False, True)


def fields(**changed):
    """Fields of a predicted claim in percent."""
    return {"id": "f1", "page": "I", "what": "cut", "value": 1.0, "unit": "%", "source": Source.COUNT} | changed
