"""How well a model does its tasks when its decode attention runs in drives, by method and compression.

A batch of samples is prefilled once on the host, all but the last token of each prompt, and shipped into the drives of
each storage format. Then every method decodes from there in turn and is cropped away again, so what is compared
differs in nothing but the method. Every answer's first token is the method's too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from csd_spec.checked import from_json
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.progress import Tick, no_tick
from vcsd_eval.accuracy.batch import BatchRun
from vcsd_eval.accuracy.data import find
from vcsd_eval.accuracy.plan import MeasurementPlan, Turn
from vcsd_eval.accuracy.rows import REFERENCE, reference, rows
from vcsd_eval.accuracy.tasks import TASKS, Room, Sample
from vcsd_eval.partial_results import ResultCache, fingerprint

BATCH = 8  # samples that are decoded together


@torch.inference_mode()
def measure_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: MeasurementPlan,
    progress_dir: Path | None = None,
    tick: Tick = no_tick,
) -> dict[str, Any]:
    """Measure every method of a plan at every compression.

    Args:
        model: Decoder in FP32 on the CPU, or in its own dtype elsewhere.
        tokenizer: The model's.
        plan: The measurement. Without `data` the task's file is looked for, see `vcsd_eval.accuracy.data`.
        progress_dir: Folder in which a run that was killed left its turns; they are used if nothing has changed.
        tick: Called after each trial on each batch.

    Returns:
        Rows with 95 % intervals and paired differences from dense attention; for tasks that force the true text also
        `reference_bits_per_byte`, by plain transformers over the same windows.

    Raises:
        ValueError: A file, a context or a method cannot be used; nothing has been run.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", plan.max_context)
    if not 64 <= plan.max_context <= limit:
        raise ValueError(f"max_context = {plan.max_context}: the model's context is {limit}, at least 64 are needed")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    task = TASKS[plan.task]
    if plan.data is None and task.kind:
        plan = replace(plan, data=find(task.kind))
    room = Room(encode, plan.max_context, plan.shots, plan.confusions)
    samples, rule = task.make(plan.data, room, plan.samples, plan.seed)
    samples.sort(key=lambda sample: len(sample.prompt))  # prompts of a batch are padded to its longest
    kept = ResultCache(progress_dir and progress_dir / f"{_fingerprint(model, plan)}.jsonl")
    for numbered in enumerate(samples[first : first + BATCH] for first in range(0, len(samples), BATCH)):
        _measure_batch(model, tokenizer, plan, numbered, kept, tick)
    done = [from_json(json.dumps(turn), Turn) for turn in kept.values()]
    result = [row | {"rule": rule} for row in rows(done, plan)]
    by_transformers = reference(done, plan)
    kept.close()
    return {
        "model": Path(model.config.name_or_path).name,
        "task": plan.task,
        "samples": len(samples),
        "max_context": plan.max_context,
        "drives": plan.drives,
        "seed": plan.seed,
        **({} if by_transformers is None else {REFERENCE: by_transformers}),
        "rows": result,
    }


def _measure_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: MeasurementPlan,
    numbered: tuple[int, list[Sample]],
    kept: ResultCache,
    tick: Tick,
) -> None:
    """Do all trials of one batch that have not been kept; numbered: the batch's number and samples."""
    number, samples = numbered
    todo = [trial for trial in plan.trials() if f"{number} {trial}" not in kept]
    for _ in range(len(plan.trials()) - len(todo)):
        tick(None)
    if not todo:
        return
    run = BatchRun(model, tokenizer, TASKS[plan.task], samples)
    for layout in dict.fromkeys(trial.contender.layout for trial in todo):
        with run.in_drives(plan.drives, layout, plan.own_methods) as (csd, prefilled):
            for trial in (each for each in todo if each.contender.layout == layout):
                kept.put(f"{number} {trial}", asdict(run.turn(number, trial, csd, prefilled)))
                tick(None)


def _fingerprint(model: PreTrainedModel, plan: MeasurementPlan) -> str:
    """Changes with the plan, the data, the model's weights and any of our sources."""
    files = [path for path in (plan.data, plan.own_methods) if path]
    files += sorted(Path(model.config.name_or_path).glob("*.safetensors"))
    return fingerprint([plan, model.config.to_dict(), INSTCSD_ZYNQ7045_8CH], files)
