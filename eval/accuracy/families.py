"""Every decoder architecture of transformers, tiny and with random weights: served correctly, or refused for a true
reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer

from csd_io.parent_death import end_with_parent
from kv_cache.policies import POLICIES, moves_blocks
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.accuracy.family import Row, try_family
from vcsd_eval.accuracy.tiny import architectures
from vcsd_eval.experiment import Outcome

PRELOADED = ["vcsd_eval.accuracy.family"]  # imported once, then forked
IN_TIERS = list(filter(moves_blocks, POLICIES))
COLUMNS = ("model type", "outcome", "logits", "control", "reason")
PAGE = """# Served architectures

`vcsd eval architectures --markdown-out docs/families.md`, transformers {version}: {found}.

The command builds every decoder that transformers has for causal language models, and those for text from images,
with tiny sizes and random weights from its default config. Each one generates in two turns on one cache, 64 steps and
8, with a prompt of 40 tokens alone and with a batch of three, two of them padded on the left; windows have 32 tokens.
It does so with the model's own attention, and with dense attention in one drive and in three, or in one drive per KV
head if there are fewer (per query head for latent rows, which every drive stores). In drives the model is given the
tokens of its own decoding, so that the logits of every step can be compared and nearly tied tokens do not matter.
Models that attach rejects immediately do not generate. All experts take part, since rounding decides between nearly
tied ones.

- **right**: all steps were in drives, and no logit differs by more than 2^-7 of the largest, nor by more than a
  quarter of *control*, the difference that another first token of the prompt causes, which reaches those steps by
  attention alone. Storage and link are FP16, 11 bits, and each layer rounds q, k, v and the output. Layers of full
  attention are in drives; windows, linear, recurrent and convolution layers stay with the model's own cache.
- **refused** with a reason, before the first token. The test then confirms the reason in the model independently: in
  its own cache, its modules, or the arguments that its layers pass to a recording attention function.
- **not_built**: default sizes that do not fit together when they are reduced, packages that are not installed, models
  that need an image.

"""
OUTCOMES = ("right", "refused", "not_built", "wrong", "crashed")


def sweep(names: Sequence[str], workers: int, limit_s: float, tick: Tick = no_tick, policy: str = "") -> list[Row]:
    """Run architectures, each in a separate process that may crash or time out without effect on the others."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def one(name: str) -> Row:
        row = _apart(context, name, limit_s, policy)
        tick(None)
        return row

    pool = ThreadPoolExecutor(workers)
    try:
        return list(pool.map(one, names))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _apart(context: Any, name: str, limit_s: float, policy: str) -> Row:
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(name, sender, policy), daemon=True)
    child.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            row: Row = receiver.recv()
            return row
        return Row(name, "crashed", f"did not end within {limit_s:g} s")
    except EOFError:
        child.join()
        return Row(name, "crashed", f"its process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()
        receiver.close()


def _work(name: str, sender: Connection, policy: str) -> None:
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers.logging.set_verbosity_error()
    sender.send(try_family(name, policy))


def experiment(
    names: Annotated[str, typer.Option(help="comma-separated model types (default: all of transformers)")] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="number of processes (default: one per core)")
    ] = None,
    limit: Annotated[
        float, typer.Option("--timeout-s", min=1, max=86_400, help="time limit per architecture, seconds")
    ] = 90.0,
    page: Annotated[Path | None, typer.Option("--markdown-out", help="Markdown file for the table")] = None,
    policy: Annotated[str, typer.Option(help="policy of a tiered KV cache that is used instead of drives")] = "",
) -> Outcome:
    """Run every decoder architecture of transformers in drives, or in tiers, and compare with its own attention."""
    if policy and policy not in IN_TIERS:
        raise ValueError(f"policy = {policy!r}: must be one of {', '.join(IN_TIERS)}")
    if policy and page:
        raise ValueError("--markdown-out is for drives only: leave out --policy")
    known = architectures()
    wanted = [name.strip() for name in names.split(",")] if names else known
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"names = {', '.join(unknown)}: transformers {transformers.__version__} has no such decoder")
    with progress("architectures", len(wanted)) as tick:
        rows = sweep(wanted, workers or len(os.sched_getaffinity(0)), limit, tick, policy)
    counts = Counter(row.outcome for row in rows)
    rows.sort(key=lambda row: (OUTCOMES.index(row.outcome), row.reason, row.name))
    cells = [(row.name, row.outcome, _share(row.difference), _share(row.control), row.reason) for row in rows]
    if page:
        page.write_text(_markdown(counts, cells), encoding="utf-8")
    unchecked = [row.name for row in rows if row.outcome == "refused" and not row.reason_checked]
    notes = [f"refused for a reason that was not found by another way: {', '.join(unchecked)}"] if unchecked else []
    summary = table("architectures", OUTCOMES, [[str(counts[name]) for name in OUTCOMES]], left=("",))
    return Outcome(
        {name: counts[name] for name in OUTCOMES} | {"rows": [asdict(row) for row in rows]},
        [table("decoder architectures", COLUMNS, cells, left=("model type", "outcome", "reason")), summary],
        notes,
        failed=bool(counts["wrong"] or counts["crashed"] or unchecked),
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _markdown(counts: Counter[str], cells: Sequence[Sequence[str]]) -> str:
    """The page: procedure, counts, and one line per architecture."""
    found = ", ".join(f"{name} {counts[name]}" for name in OUTCOMES)
    head = PAGE.format(version=transformers.__version__, found=found)
    table_lines = ["| " + " | ".join(each) + " |" for each in (COLUMNS, ["---"] * len(COLUMNS))]
    table_lines += ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in cells]
    return head + "\n".join(table_lines) + "\n"
