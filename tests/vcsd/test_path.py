"""From a request to a token: the files and functions on the way of q, through both doors.

partner of: host_driver/hf/forward.py, host_driver/hf/rows.py
"""

import re
import sys
import threading
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
import torch

import vcsd
from csd_firmware import fused, inprocess
from tests.host_driver.hf.test_cache import VOCABULARY, llama

ROOT, MOST = Path(__file__).parents[2], 10
PRODUCT = ("csd_firmware", "host_driver", "vcsd", "kv_cache", "csd_link", "csd_spec", "ftl", "attention_engine")


def way(run, monkeypatch):
    """Files and functions of the product on the stack of the kernel of a decode step, outermost first."""
    calls, kernel = [], fused._store_and_attend

    def noted(*arguments):
        if not calls and threading.current_thread() is threading.main_thread():
            frame = sys._getframe(1)
            while frame is not None:
                file, code = Path(frame.f_code.co_filename), frame.f_code
                if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PRODUCT:
                    calls.append((str(file.relative_to(ROOT)), code.co_name))
                frame = frame.f_back
        return kernel(*arguments)

    monkeypatch.setattr(inprocess, "_has_handlers", lambda: False)  # else a thread of the drive carries commands out
    monkeypatch.setattr(fused, "_store_and_attend", noted)
    run()
    return calls[::-1]


def attached():
    model = llama().eval()
    with torch.inference_mode(), vcsd.attach(model, method="dense"):
        model.generate(torch.randint(3, VOCABULARY, (1, 9)), max_new_tokens=4, do_sample=False, pad_token_id=0)


def served():
    with vcsd.serve(llama().eval(), policy="in-storage", drives=1, background=False) as server:
        server.submit(list(range(3, 12)), 4).result()


def documented(part):
    """Files of a part of the way, as ARCHITECTURE.md has them."""
    (line,) = re.findall(rf"^{part} +(.*\.py)$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return line.split(" > ")


@pytest.mark.parametrize(("run", "door"), [(attached, "attach"), (served, "serve")])
def test_at_most_ten_files_from_request_to_token(run, door, monkeypatch):
    calls = way(run, monkeypatch)
    files = list(dict.fromkeys(file for file, _ in calls))
    assert files == documented(door) + documented("both") + documented("drive")
    assert len(files) <= MOST, files
    packages = [package for package, _ in groupby(file.partition("/")[0] for file in files)]
    assert len(packages) == len(set(packages)), packages  # none is entered twice
    names = Counter(name for _, name in calls if not name.startswith("<"))
    assert max(names.values()) == 1, names
