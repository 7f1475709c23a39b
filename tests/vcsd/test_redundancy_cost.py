"""The modelled cost of redundancy: a decode computed by hand, and properties of every decode and drive."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vcsd
from csd_spec import ModelShape
from csd_spec.network import network_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.loading import CHECKPOINT, load
from vcsd.redundancy_cost import (
    Decode,
    Estimate,
    HostCompute,
    Rates,
    cheapest,
    costs,
    flash_factor,
    is_useful,
)

MB = 1_000_000
SHAPE = ModelShape(name="small", layers=2, q_heads=8, kv_heads=4, head_dim=64)
# 8 drives, each 10 sequences x 1,000 tokens x 800 bytes / 8 = 1 MB
DECODE = Decode(drives=8, batch=10, tokens=1000, decoded=100, token_bytes=800)
RATES = Rates(
    link_bytes_per_s=4.0 * MB,
    port_bytes_per_s=8.0 * MB,
    program_bytes_per_s=2.0 * MB,
    flash_factor=1.5,
    capacity_bytes=4 * MB,
    prefill_s=3.0,
    step_s=0.02,
)


def figures(found):
    return {name: (each.storage_bytes, each.step_bytes, each.degraded_s, each.full_s) for name, each in found.items()}


def test_costs_match_a_hand_computed_decode():
    assert figures(costs(DECODE, RATES)) == {
        "none": (0, 0, None, None),
        "mirror": (12 * MB, 8000, 0, 1.5),  # 2 x 1.5 MB are programmed at 2 MB/s
        "parity": (2 * MB, 2000, 0.5, 0.75),  # 4 MB cross the port at 8 MB/s, then 1.5 MB are programmed at 2 MB/s
        "recompute": (0, 0, 5, 5.75),  # 3 s + 100 x 0.02 s
    }
    narrow = replace(RATES, port_bytes_per_s=1.0 * MB)
    assert figures(costs(DECODE, narrow, 7)) == {
        "none": (0, 0, None, None),
        "mirror": (12 * MB, 8000, 0, 2),
        "parity": (2 * MB, 2000, 7, 7),  # two groups, of at most 7 drives
        "recompute": (0, 0, 5, 6),
    }


def test_cheapest_survives_and_fits():
    found = costs(DECODE, RATES)
    least = [cheapest(found, figure) for figure in ("storage_bytes", "step_bytes", "degraded_s", "full_s")]
    assert least == [["recompute"], ["recompute"], ["mirror"], ["parity"]]
    small = costs(DECODE, replace(RATES, capacity_bytes=2 * MB))  # 3 MB in a mirror
    assert [name for name, cost in small.items() if not cost.fits] == ["mirror"]
    assert cheapest(small, "degraded_s") == ["parity"]
    assert cheapest(costs(DECODE, replace(RATES, capacity_bytes=MB)), "storage_bytes") == []


def test_parity_is_useful_between_mirror_and_recompute():
    assert is_useful(costs(DECODE, RATES), "parity")
    fast_host = replace(RATES, prefill_s=0.3, step_s=0.001)  # computed again after 0.4 s, read after 0.5 s
    assert not is_useful(costs(DECODE, fast_host), "parity")
    coded = replace(RATES, flash_factor=0.1)  # a mirrored row takes less than the opaque row of a parity
    assert not is_useful(costs(DECODE, coded), "parity")
    assert not is_useful(costs(replace(DECODE, drives=1), RATES), "parity")


def test_one_drive_has_neither_mirror_nor_parity():
    assert list(costs(replace(DECODE, drives=1), RATES)) == ["none", "recompute"]


def test_tokens_decoded_must_be_fewer_than_stored():
    with pytest.raises(ValueError, match="decoded = 1000: must be fewer than tokens = 1000"):
        replace(DECODE, decoded=1000)


rate = st.floats(1e6, 1e11)
some_rates = st.builds(
    Rates,
    link_bytes_per_s=rate,
    port_bytes_per_s=rate,
    program_bytes_per_s=rate,
    flash_factor=st.floats(0.5, 2),
    capacity_bytes=st.integers(1 << 20, 1 << 42),
    prefill_s=st.floats(0, 1e5),
    step_s=st.floats(0, 10),
)
some_decodes = st.builds(
    Decode,
    drives=st.integers(2, 64),
    batch=st.integers(1, 512),
    tokens=st.integers(101, 1 << 20),
    decoded=st.integers(0, 100),
    token_bytes=st.integers(2, 1 << 20),
)


@given(some_decodes, some_rates, st.integers(2, 16))
def test_mirror_serves_first_and_parity_stores_less(decode, rates, parity_drives):
    found = costs(decode, rates, parity_drives)
    assert cheapest({name: replace(cost, fits=True) for name, cost in found.items()}, "degraded_s")[0] == "mirror"
    groups = -(-decode.drives // min(parity_drives, decode.drives))
    if rates.flash_factor * decode.drives >= groups:
        assert found["parity"].storage_bytes <= found["mirror"].storage_bytes
    assert found["parity"].step_bytes <= found["mirror"].step_bytes
    assert all((cost.full_s or inf) >= (cost.degraded_s or 0) for cost in found.values())


@given(some_decodes, some_rates, st.integers(1, 1 << 20))
def test_more_tokens_never_cost_less(decode, rates, more):
    short, long = costs(decode, rates), costs(replace(decode, tokens=decode.tokens + more), rates)
    for name, cost in short.items():
        assert long[name].storage_bytes >= cost.storage_bytes
        assert (long[name].degraded_s or 0) >= (cost.degraded_s or 0)
        assert (long[name].full_s or 0) >= (cost.full_s or 0)
        assert cost.fits or not long[name].fits


def test_rates_follow_from_the_drive_and_the_network():
    spec = INSTCSD_ZYNQ7045_8CH
    rates = Rates.of(spec, 4, None, 1.5, (1.0, 0.1))
    assert rates.link_bytes_per_s == pytest.approx(3.938e9)
    assert rates.port_bytes_per_s == 4 * rates.link_bytes_per_s
    assert rates.program_bytes_per_s == pytest.approx(256 * 4096 / 600e-6)  # 256 planes, each a page in 600 us
    far = Rates.of(spec, 4, network_named("25gbe"), 1.5, (1.0, 0.1))
    assert far.port_bytes_per_s == network_named("25gbe").bytes_per_s
    slow = replace(spec, geometry=replace(spec.geometry, channels=1), timing=replace(spec.timing, read_ns=10_000_000))
    assert Rates.of(slow, 4, None, 1.5, (1.0, 0.1)).link_bytes_per_s == pytest.approx(32 * 4096 / 10e-3)


def test_flash_factor_counts_copies_of_k():
    factors = [flash_factor(INSTCSD_ZYNQ7045_8CH, layout, SHAPE, 1024) for layout in ("fp16", "plain")]
    assert factors == [1.5, 1]


def test_latent_rows_are_stored_by_every_drive():
    latent = replace(SHAPE, kv_heads=1, latent=True)
    decode = Decode.of(latent, 4, 1, 1000, 10)
    assert decode.drive_bytes == 1000 * latent.kv_bytes_per_token
    assert costs(decode, RATES)["mirror"].step_bytes == 4 * latent.kv_bytes_per_token


def test_host_is_as_fast_as_its_slower_rate():
    host = HostCompute(parameters=1e6, weight_bytes=2e6, flop_per_s=1e9, memory_bytes_per_s=1e9)
    prefill_s, step_s = host.times_s(DECODE)
    assert prefill_s == pytest.approx(900 * 2e6 * 10 / 1e9)
    assert step_s == pytest.approx(2e7 / 1e9)  # 9.6 MB are read meanwhile
    slow = replace(host, memory_bytes_per_s=1e8)
    assert slow.times_s(DECODE)[1] == pytest.approx((2e6 + 10 * 950 * 800) / 1e8)


def test_estimate_is_one_line_with_every_scheme():
    text = str(Estimate(DECODE, RATES, "assumed"))
    assert "\n" not in text
    assert "mirror +12 MB, +8 kB a step, serves after 0 s, redundant after 1.5 s" in text
    assert "parity 4+1 (not built) +2 MB" in text
    assert text.endswith("least storage: recompute; least time to service: mirror")
    full = Estimate(DECODE, replace(RATES, capacity_bytes=MB), "assumed")
    assert "does not fit" in str(full) and str(full).endswith("least time to service: none fits")


def test_attached_model_estimates_before_it_decodes():
    model, _ = load(CHECKPOINT)
    with vcsd.attach(model, drives=2, redundancy="mirror", network="25gbe") as csd:
        found = csd.redundancy_estimate(rows=3, tokens=1000, new_tokens=100)
    assert found.decode.batch == 3 and found.decode.token_bytes == 4 * 4 * 64 * 2 * 2
    assert found.rates.port_bytes_per_s == network_named("25gbe").bytes_per_s
    assert found.rates.flash_factor == 1.5
    assert found.rates.prefill_s > 0 and "assumed on the host: prefill" in found.assumed
