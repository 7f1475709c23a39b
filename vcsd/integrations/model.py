"""Identity of the model that vLLM serves: resolved configuration and files, and those of its LoRA adapters."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from host_driver.prefixes.identity import Check, FileIdentity, ModelIdentity, canonical, files_of
from vcsd.integrations.settings import Settings

FOLDER_FORMATS = (  # load formats that read weights only from the model's folder
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
DUMMY = "dummy"  # load format of random weights
MODEL = "dtype", "quantization"
CACHE = ("cache_dtype",)
PARALLEL = ("tensor_parallel_size",)
# Fields that only some versions of vLLM have
MODEL_OPTIONAL = "model_impl", "code_revision", "disable_sliding_window", "override_attention_dtype"
CACHE_OPTIONAL = "kv_sharing_fast_prefill", "kv_cache_dtype_skip_layers"
PARALLEL_OPTIONAL = (
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "cp_kv_cache_interleave_size",
)
LENGTH_DEPENDENT_ROPE = '"longrope"', '"su"', '"dynamic"'  # factors depend on max_model_len
_LOG = logging.getLogger("vcsd")


def identity_of(vllm_config: Any, settings: Settings, **form: str) -> ModelIdentity:
    """Identity of the model that an engine serves.

    Args:
        vllm_config: The engine's `VllmConfig`, with overrides resolved.
        settings: How weights are identified: by their files or by the operator's words.
        form: Anything else that the values of the KV cache depend on.

    Raises:
        ValueError: Keys and values depend on something that is unknown here.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError("calculate_kv_scales: turn it off, with it the KV cache depends on the first request")
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    models = {"": model} | ({"draft/": draft} if draft is not None and draft is not model else {})
    config = {
        "vllm": getattr(sys.modules.get("vllm"), "__version__", ""),
        "models": {prefix: _resolved(model_config) for prefix, model_config in models.items()},
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
        for prefix, model_config in models.items():
            files += _files(model_config, vllm_config.load_config, settings.weights, prefix)
    return ModelIdentity(name=str(model.model), config=canonical(config), files=files, check=settings.weights)


def _resolved(model: Any) -> dict[str, Any]:
    """A model's configuration as vLLM uses it."""
    resolved = {name: _as_dict(getattr(model, name)) for name in ("hf_config", "hf_text_config")}
    resolved |= _fields(model, MODEL, MODEL_OPTIONAL)
    if any(kind in json.dumps(resolved, default=str) for kind in LENGTH_DEPENDENT_ROPE):
        resolved["max_model_len"] = model.max_model_len
    return resolved


def _as_dict(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else config


def _fields(values: Any, needed: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(values, name) for name in needed} | {name: getattr(values, name, None) for name in optional}


def _check_weights(vllm_config: Any) -> None:
    """Raise ValueError if the weights may differ from those in the model's folder."""
    load_format = vllm_config.load_config.load_format
    if load_format not in (*FOLDER_FORMATS, DUMMY):
        raise ValueError(f"load_format = {load_format}: the location of its weights is unknown, {_WORDS}")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError(f"weight_transfer_config: weights change while the engine runs, {_WORDS}")


_WORDS = 'set "identity" to words that change when the weights do'


def _files(model: Any, load: Any, check: Check, prefix: str) -> tuple[FileIdentity, ...]:
    if load.load_format == DUMMY:
        return ()
    return files_of(locate(model.model, model.revision, load.download_dir), check, prefix)


def locate(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Folder or file of a model: a path, or a name in the Hugging Face hub's cache; no network is used.

    Raises:
        ValueError: It is not on this machine.
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
    """Identities of LoRA adapters, by their files at the time of a request.

    vLLM loads an adapter's files at an unknown time and caches them under the adapter's number. If the files change
    under a known number, it is unknown which version a request uses.
    """

    def __init__(self, check: Check) -> None:
        self._check: Check = check
        self._seen: dict[int, str] = {}

    def identity(self, lora: Any) -> str | None:
        """Digest of a request's adapter; None if it is unknown, and the request must be ignored."""
        try:
            files = files_of(locate(lora.lora_path), self._check)
        except (OSError, ValueError) as error:
            _LOG.warning("prefixes: adapter %s: %s; its requests are ignored", lora.lora_name, error)
            return None
        now = ModelIdentity(name=lora.lora_name, files=files, check=self._check).digest
        if self._seen.setdefault(lora.lora_int_id, now) == now:
            return now
        _LOG.warning(
            "prefixes: adapter %s has changed under the number %d: its requests are ignored until the engine"
            " is restarted, or loads it under another number",
            lora.lora_name,
            lora.lora_int_id,
        )
        return None
