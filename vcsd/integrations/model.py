"""The model that vLLM serves, as an identity: its resolved configuration and its files, and those of its adapters."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from host_driver.prefixes.identity import Check, FileIdentity, ModelIdentity, canonical, files_of
from vcsd.integrations.settings import Settings

FOLDER_FORMATS = (  # load formats that read weights from the model's folder alone
    "auto",
    "hf",
    "pt",
    "safetensors",
    "fastsafetensors",
    "bitsandbytes",
    "sharded_state",
    "gguf",
    "mistral",
)
DUMMY = "dummy"  # the load format of random weights
MODEL = "dtype", "quantization"
CACHE = ("cache_dtype",)
PARALLEL = ("tensor_parallel_size",)
# Fields that not every version of vLLM has
MODEL_OPTIONAL = "model_impl", "code_revision", "disable_sliding_window", "override_attention_dtype"
CACHE_OPTIONAL = "kv_sharing_fast_prefill", "kv_cache_dtype_skip_layers"
PARALLEL_OPTIONAL = (
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "cp_kv_cache_interleave_size",
)
LENGTH_DEPENDENT_ROPE = '"longrope"', '"su"', '"dynamic"'  # which factors apply depends on max_model_len
_LOG = logging.getLogger("vcsd")


def identity_of(vllm_config: Any, settings: Settings, **form: str) -> ModelIdentity:
    """Identity of the model that an engine serves.

    Args:
        vllm_config: The engine's `VllmConfig`, with overrides resolved.
        settings: How weights are read, or the operator's words in place of them.
        form: Whatever else the values of the KV cache depend on.

    Raises:
        ValueError: Keys and values depend on more than can be known here.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError("calculate_kv_scales: turn it off, with it the KV cache depends on the first request")
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    models = {"": model} | ({"draft/": draft} if draft is not None and draft is not model else {})
    config = {
        "vllm": getattr(sys.modules.get("vllm"), "__version__", ""),
        "models": {prefix: _resolved(each) for prefix, each in models.items()},
        "cache": _fields(cache, CACHE, CACHE_OPTIONAL),
        "parallel": _fields(vllm_config.parallel_config, PARALLEL, PARALLEL_OPTIONAL),
        "attention": getattr(getattr(vllm_config, "attention_config", None), "backend", None),
        "form": form,
        "load_format": vllm_config.load_config.load_format,
        "words": settings.identity,
    }
    files: tuple[FileIdentity, ...] = ()
    if not settings.identity:
        _check_weights(vllm_config)
        for prefix, each in models.items():
            files += _files(each, vllm_config.load_config, settings.weights, prefix)
    return ModelIdentity(name=str(model.model), config=canonical(config), files=files, check=settings.weights)


def _resolved(model: Any) -> dict[str, Any]:
    """A model's configuration as vLLM computes with it."""
    found = {name: _as_dict(getattr(model, name)) for name in ("hf_config", "hf_text_config")}
    found |= _fields(model, MODEL, MODEL_OPTIONAL)
    if any(kind in json.dumps(found, default=str) for kind in LENGTH_DEPENDENT_ROPE):
        found["max_model_len"] = model.max_model_len
    return found


def _as_dict(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else config


def _fields(values: Any, needed: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(values, name) for name in needed} | {name: getattr(values, name, None) for name in optional}


def _check_weights(vllm_config: Any) -> None:
    """Raise ValueError for weights that are not those of the model's folder."""
    load_format = vllm_config.load_config.load_format
    if load_format not in (*FOLDER_FORMATS, DUMMY):
        raise ValueError(f"load_format = {load_format}: its weights may be anywhere, {_WORDS}")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError(f"weight_transfer_config: weights change while the engine runs, {_WORDS}")


_WORDS = 'set "identity" to words that change when the weights do'


def _files(model: Any, load: Any, check: Check, prefix: str) -> tuple[FileIdentity, ...]:
    if load.load_format == DUMMY:
        return ()
    return files_of(locate(model.model, model.revision, load.download_dir), check, prefix)


def locate(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """A model's folder or file: a path as it is, or a name in the cache of the Hugging Face hub; no network is used.

    Raises:
        ValueError: It is on this machine neither way.
    """
    path = Path(model)
    if path.exists():
        return path.resolve()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"model {model}: its files are not on this machine, {_WORDS}") from error


class Adapters:
    """Identities of LoRA adapters, by their files when a request names them.

    vLLM loads an adapter's files when it likes, and keeps them under the adapter's number. Should they change under a
    number that was seen, nobody knows with which of both a request computes.
    """

    def __init__(self, check: Check) -> None:
        self._check: Check = check
        self._seen: dict[int, str] = {}

    def identity(self, lora: Any) -> str | None:
        """Digest of a request's adapter; None if it is not known, and the request is to be left alone."""
        try:
            files = files_of(locate(lora.lora_path), self._check)
        except (OSError, ValueError) as error:
            _LOG.warning("prefixes: adapter %s: %s; its requests are left alone", lora.lora_name, error)
            return None
        now = ModelIdentity(name=lora.lora_name, files=files, check=self._check).digest
        if self._seen.setdefault(lora.lora_int_id, now) == now:
            return now
        _LOG.warning(
            "prefixes: adapter %s has changed under the number %d: its requests are left alone until the engine"
            " starts again, or loads it under another number",
            lora.lora_name,
            lora.lora_int_id,
        )
        return None
