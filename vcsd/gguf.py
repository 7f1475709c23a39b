"""Conversion of GGUF files (llama.cpp) to folders for `--model`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from csd_spec.optional import require

_MAGIC = b"GGUF"
_OF_THE_FILE = ("quantization_config", "_model_name_or_path")  # entries that prevent saving, or name the file


def require_gguf() -> None:
    """Raise MissingExtraError if the gguf package is not installed."""
    require("a GGUF file", "model", "gguf")


def convert_gguf(file: Path, out: Path) -> dict[str, int]:
    """Convert a GGUF file to a transformers folder with model and tokenizer, weights in FP32.

    Quantized weights are dequantized, so the folder computes the same as transformers does from the file.

    Args:
        file: GGUF file of an architecture that transformers supports.
        out: Folder to create; it must not exist, and appears only when it is complete.

    Returns:
        The model's shape, by name.

    Raises:
        ValueError: The folder exists or its parent does not, the file is not GGUF, or transformers cannot read it.
    """
    require_gguf()
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}: create it first")
    with file.open("rb") as opened:
        if opened.read(4) != _MAGIC:
            raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF")
    model, tokenizer = _load(file)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}-") as work:
        model.save_pretrained(Path(work) / out.name)
        tokenizer.save_pretrained(Path(work) / out.name)
        os.rename(Path(work) / out.name, out)
    text = model.config.get_text_config(decoder=True)
    return {
        "layers": text.num_hidden_layers,
        "query_heads": text.num_attention_heads,
        "kv_heads": text.num_key_value_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "context": text.max_position_embeddings,
        "vocabulary": text.vocab_size,
        "parameters": model.num_parameters(),
    }


def _load(file: Path) -> tuple[Any, Any]:
    """Model without the settings by which transformers refuses to save it, and tokenizer."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bar; read when tqdm is imported
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    at: Any = {"gguf_file": file.name, "local_files_only": True}
    try:
        read = AutoModelForCausalLM.from_pretrained(file.absolute().parent, dtype=torch.float32, **at)
        tokenizer = AutoTokenizer.from_pretrained(file.absolute().parent, **at)
    except Exception as error:  # unknown architectures and truncated files raise various exceptions
        raise ValueError(f"transformers cannot read {file}: {str(error).splitlines()[0]}") from error
    told = {name: value for name, value in read.config.to_dict().items() if name not in _OF_THE_FILE}
    with torch.device("meta"):
        model = type(read)(type(read.config).from_dict(told))
    model.load_state_dict({name: weight.float() for name, weight in read.state_dict().items()}, assign=True)
    model.tie_weights()
    if read.generation_config is not None:
        model.generation_config = read.generation_config
    return model, tokenizer
