"""Old names of the public Python API: each works, and warns with the new one."""

from pathlib import Path

import pytest

import attention_engine
import csd_spec
import vcsd
from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig
from csd_spec.renamed import REMOVED_IN, new_arguments, old_names
from kv_cache import AdmissionConfig
from tests.host_driver.hf.test_cache import llama
from vcsd import AttachConfig, ServingConfig
from vcsd.attach_options import OLD_OPTIONS

PATH = Path(__file__)
FIELDS = [
    (DriveSetConfig, "keep", "data_dir", PATH.parent / "drives"),
    (DriveSetConfig, "restart", "restart_drives", False),
    (DriveSetConfig, "methods", "methods_file", PATH),
    (DriveSetConfig, "layouts", "layouts_file", PATH),
    (AttentionConfig, "storage", "kv_dtype", "bf16"),
    (AttachConfig, "mini_batches", "micro_batches", 2),
    (AttachConfig, "flush_every", "flush_interval_steps", 3),
    (ServingConfig, "slots", "max_batch_size", 3),
    (ServingConfig, "slice_tokens", "time_slice_tokens", 5),
    (ServingConfig, "max_waiting", "max_queued_requests", 7),
    (ServingConfig, "chunk", "prefill_chunk_tokens", 9),
    (ServingConfig, "measured", "replan_on_drift", True),
    (AdmissionConfig, "slots", "max_batch_size", 3),
    (AdmissionConfig, "chunk", "prefill_chunk_tokens", 5),
    (AdmissionConfig, "queue", "max_queued_requests", 7),
    (AdmissionConfig, "aging", "aging_factor", 2.0),
    (AdmissionConfig, "patience", "max_paused_steps", 9),
]


def expect_warning(new):
    return pytest.warns(DeprecationWarning, match=rf"is now (.*\.)?{new}.*release {REMOVED_IN}")


@pytest.mark.parametrize("old", vcsd._OLD)
def test_old_name_of_vcsd_is_the_new_object(old):
    with expect_warning(vcsd._OLD[old]):
        assert getattr(vcsd, old) is getattr(vcsd, vcsd._OLD[old])


def test_old_names_of_lower_packages_are_the_new_objects():
    with expect_warning("CompressionBudget"):
        assert csd_spec.Compression is csd_spec.CompressionBudget
    with expect_warning("DecodeStep"):
        assert attention_engine.Step is attention_engine.DecodeStep


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'm' has no attribute 'other'"):
        old_names("m", {"old": "new"})("other")
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = DriveSetConfig().other


@pytest.mark.parametrize(("kind", "old", "new", "value"), FIELDS)
def test_old_field_sets_and_reads_the_new_one(kind, old, new, value):
    with expect_warning(new):
        config = kind(**{old: value})
    assert config == kind(**{new: value}) != kind()
    with expect_warning(new):
        assert getattr(config, old) == value


OPTIONS = {
    "attention": "dense",
    "convention": "bytes",
    "flush_every": 2,
    "keep": None,
    "layouts": None,
    "methods": None,
    "mini_batches": 2,
    "residency": "in-storage",
    "restart": False,
    "storage": "fp16",
}


@pytest.mark.parametrize("old", OLD_OPTIONS)
def test_old_option_of_attach_works(old):
    with expect_warning(OLD_OPTIONS[old]), vcsd.attach(llama(), **{old: OPTIONS[old]}) as csd:
        config, driver = csd.config, csd.driver
    assert old != "attention" or driver.attention.method == "dense"
    assert old != "convention" or driver.attention.budget.convention == "bytes"
    assert old != "flush_every" or config.flush_interval_steps == 2
    assert old != "mini_batches" or config.micro_batches == 2
    assert old != "restart" or not config.drives.restart_drives
    assert old != "storage" or config.attention.kv_dtype == "fp16"


def test_both_names_of_an_argument_raise_type_error():
    with pytest.raises(TypeError, match=r"keep is the old name of data_dir: give data_dir alone"):
        new_arguments("attach", {"keep": 1, "data_dir": 2}, {"keep": "data_dir"})
    with pytest.raises(TypeError, match="residency is the old name of policy"):
        vcsd.attach(llama(), policy="flexgen", residency="auto")
