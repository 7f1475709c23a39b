"""Folder in which mutated invocations run: valid files of every kind, an existing drive, a new one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

from csd_firmware import InProcessDrive
from csd_firmware.folder import encode_description
from csd_spec import DriveSpec, Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from nvmevirt_config.document import dump_yaml
from vcsd_eval.papers.profiles import FOLDER

DRIVE: DriveSpec = replace(
    INSTCSD_ZYNQ7045_8CH,
    name="small",
    dram_bytes=64 << 20,
    geometry=Geometry(
        channels=2, dies_per_channel=1, planes_per_die=1, blocks_per_plane=32, pages_per_block=16, page_bytes=4096
    ),
)
_SERVED = {
    "drives": [
        {"name": "one", "drive": "drive.yaml", "path": "flash", "tenants": ["alice", "bob"]},
        {"name": "two", "device": "ram", "offset_bytes": 4096, "layout": {"depth": 2, "slot_blocks": 4}},
    ],
    "restart": False,
}
_CREATED = {"drives": [{"name": "one", "path": ".", "drive": "../../drive.yaml"}]}
_ASKED = {"question": "Who sings?", "answers": [{"text": "Ann", "answer_start": 0}]}
_SQUAD = {"data": [{"title": "Songs", "paragraphs": [{"context": "Ann sings.", "qas": [_ASKED]}] * 3}] * 3}
_METHODS = "from attention_engine import METHODS\n\nMETHODS['mine'] = METHODS['dense']\n"

# Text of each document, and whether all commands must refuse a version with a wrong schema: some schemas
# are third-party, one wrong bit of drive.json is corrected, and a drive can be deleted whatever its file contains
DOCUMENTS: dict[str, tuple[str, bool]] = {
    "drive.yaml": (dump_yaml(asdict(DRIVE)), True),
    "drives.yaml": (dump_yaml(_SERVED), True),
    "model.yaml": ((FOLDER / "model" / "opt-6.7b.yaml").read_text(), True),
    "gpu.yaml": ((FOLDER / "gpu" / "a6000.yaml").read_text(), True),
    "host.yaml": ((FOLDER / "host" / "pcie4.yaml").read_text(), True),
    "squad.json": (json.dumps(_SQUAD), False),
    "trace.txt": ("0 0 0 8 1\n1000 0 8 8 0\n2000 0 16 8 1\n", False),
    "requests.csv": ("prompt,output\n100,20\n200,30\n", False),
    "text.txt": ("In the drives lie keys and values. " * 60, False),
    "methods.py": (_METHODS, False),
    "kept/drive.json": (encode_description(DRIVE).decode(), False),
    "home/one/served.yaml": (dump_yaml(_CREATED), False),
}
READ = {
    "kept": "kept/drive.json",
    "one": "home/one/served.yaml",
}  # file read for a word that is not the name of a document

# Valid values of arguments and options: those of a command, and those of all that have one of this name
NAMES: dict[tuple[str, str], str] = {
    ("", "drive"): "kept",
    ("run", "drive"): "drive.yaml",
    ("serve-model", "drive"): "drive.yaml",
    ("create", "drive"): "drive.yaml",
    ("throughput", "drive"): "drive.yaml",
    ("breakdown", "drive"): "drive.yaml",
    ("engine-breakdown", "drive"): "drive.yaml",
    ("scaling", "drive"): "drive.yaml",
    ("sensitivity", "drive"): "drive.yaml",
    ("restore", "drive"): "restored",
    ("restore", "snapshot"): "kept",
    ("io-passthru", "drive"): "one",
    ("io-passthru", "opcode"): "0xca",
    ("io-passthru", "parameter"): "2",
    ("", "name"): "one",
    ("create", "name"): "new",
    ("", "folder"): "copy",
    ("", "what"): "drives.yaml",
    ("", "tenant"): "alice",
    ("replay", "file"): "trace.txt",
    ("record", "file"): "made.txt",
    ("", "task"): "squad",
    ("", "data"): "squad.json",
    ("", "text"): "text.txt",
    ("", "prompt"): "keys and values",
    ("", "prompt_file"): "text.txt",
    ("", "methods"): "methods.py",
    ("", "trace"): "requests.csv",
    ("", "plot"): "picture.png",
    ("", "picture"): "picture.png",
    ("", "timeline"): "made.json",
    ("", "csv_out"): "made.csv",
    ("", "vidur"): "made.csv",
    ("throughput", "model"): "model.yaml",
    ("claims", "model"): "model.yaml",
    ("report", "model"): "model.yaml",
    ("", "gpu"): "gpu.yaml",
    ("", "host"): "host.yaml",
    ("", "ray"): "127.0.0.1:1",
    ("serve-model", "host"): "127.0.0.1",
    ("serve-model", "api_key"): "secret",
    ("serve-model", "served_model_name"): "small",
    ("serve-model", "model"): str(files("vcsd") / "shipped" / "checkpoint"),
    ("", "keep"): "kept-here",
    ("", "out"): "out",
    ("", "module"): "binary",
    ("", "console"): "console",
    ("", "output_file"): "data",
    ("", "input_file"): "binary",
    ("", "window"): "window",
    ("", "mount"): "mounts",
    ("", "progress_dir"): "progress",
    ("llama2c", "model"): "binary",
    ("llama2c", "tokenizer"): "binary",
}

# Options that shorten commands which would take minutes
SHORT: dict[tuple[str, str], str] = {
    ("top", "rounds"): "1",
    ("run", "max_new_tokens"): "2",
    ("serve-model", "policy"): "ours",  # with both, options of drives are valid
    ("serve-model", "drives"): "2",
    ("accuracy", "method"): "dense",
    ("accuracy", "compression"): "1",
    ("methods", "compression"): "8",
}


def make_folder(folder: Path) -> None:
    """Write all files into an existing folder."""
    (folder / "home").mkdir(mode=0o700)
    for where in (folder / "kept", folder / "home" / "one"):
        InProcessDrive(DRIVE, where).close()
    for name, (text, _) in DOCUMENTS.items():
        (folder / name).write_text(text)
    (folder / "binary").write_bytes(bytes(range(256)) * 64)
