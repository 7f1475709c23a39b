"""`python -m tests.host_driver.hf.architectures.page`: collect the rows of a long run, and write docs/families.md.

`.venv/bin/pytest --long -n 2 tests/host_driver/hf/architectures` leaves a row of each architecture in ROWS.
"""

import json
from dataclasses import asdict
from pathlib import Path

import transformers

from tests.host_driver.hf.architectures.comparison import Row
from vcsd_eval.doc_tables import with_table

ROOT = Path(__file__).parents[4]
ROWS = ROOT / "build" / "architectures"
RESULT = Path(__file__).with_name("result.json")
PAGE = ROOT / "docs" / "families.md"
TABLE = "architectures"
OUTCOMES = ("right", "refused", "not_built", "wrong", "crashed")


def leave(row: Row) -> None:
    """Write an architecture's row into ROWS."""
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{row.name}.json").write_text(json.dumps(asdict(row)))


def recorded() -> dict:
    """The result: version of transformers, and rows of all architectures."""
    return json.loads(RESULT.read_text())


def collect() -> dict:
    """Result of a long run, sorted as the page shows it."""
    rows = [json.loads(path.read_text()) for path in ROWS.glob("*.json")]
    rows.sort(key=lambda row: (OUTCOMES.index(row["outcome"]), row["reason"], row["name"]))
    return {"transformers": transformers.__version__, "rows": rows}


def page(result: dict) -> str:
    """The page with a result's table."""
    rows = {outcome: [row for row in result["rows"] if row["outcome"] == outcome] for outcome in OUTCOMES}
    counts = ", ".join(f"{outcome} {len(of)}" for outcome, of in rows.items())
    worst = max(rows["right"], key=lambda row: row["difference"])
    names = {outcome: ", ".join(row["name"] for row in of) for outcome, of in rows.items()}
    lines = [
        f"transformers {result['transformers']}: {counts}. Largest difference of a right one: "
        f"{worst['difference']:.1e} ({worst['name']}), control {worst['control']:.1e}.",
        f"**Right**: {names['right']}.",
        f"**Not built**: {names['not_built']}.",
    ]
    cells = [(row["name"], row["outcome"], row["reason"].replace("|", "/")) for row in result["rows"]]
    shown = [("model type", "outcome", "reason"), ("---",) * 3]
    shown += [row for row in cells if row[1] not in ("right", "not_built")]
    lines.append("\n".join(f"| {' | '.join(row)} |" for row in shown))
    return with_table(PAGE.read_text(), TABLE, "\n\n".join(lines))


def main() -> None:
    """Write the result of a long run, and its page."""
    result = collect()
    lines = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    RESULT.write_text(f'{{\n "transformers": "{result["transformers"]}",\n "rows": [\n{lines}\n ]\n}}\n')
    PAGE.write_text(page(result))


if __name__ == "__main__":
    main()
