"""A serving model: tokens of each request as alone, while other requests arrive, finish, are cancelled or rejected.

partner of: vcsd/server.py, vcsd/serving.py, vcsd/sampling.py, vcsd/counters.py
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future

import pytest
import torch

import vcsd
from csd_firmware import InProcessDrive
from csd_spec import Attend, Completion, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from kv_cache.limits import TierLimits
from tests.failing_device import FailingDevice
from tests.host_driver.hf.test_adapters import MADE
from tests.host_driver.hf.test_cache import VOCABULARY, llama, sharpen
from tests.host_driver.hf.test_device import gemma2, gpt_oss
from tests.host_driver.hf.test_layers import gemma3
from tests.served import HANG_S
from vcsd.config import ServingConfig
from vcsd.sampling import Sampler
from vcsd.serving import serve
from vcsd_eval.verify.serving import POLICIES, WITH_DRIVES

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # of the tiny model, in FP32
LONGEST = 72


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    with torch.inference_mode():
        return sharpen(llama())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (4 + 5 * i,), generator=draw).tolist() for i in range(9)]


def setting(policy: str, **more) -> ServingConfig:  # type: ignore[no-untyped-def]
    """Tiers that hold a quarter of the KV data of six requests of maximum length."""
    drives = 2 if policy in WITH_DRIVES else 0
    size = 6 * LONGEST * TOKEN_BYTES // 4 // (2 if drives else 1)
    asked = {"policy": policy, "tiers": TierLimits(device=size, host=size), "drives": drives, "max_batch_size": 6}
    return ServingConfig(**asked | {"max_tokens": LONGEST, "time_slice_tokens": 4} | more)


def ask(server, prompt: list[int], number: int) -> vcsd.RequestHandle:  # type: ignore[no-untyped-def]
    """Each other request is greedy, each third one has stop tokens."""
    sampling = vcsd.SamplingParams(temperature=0.9 * (number % 2), top_p=0.9, top_k=40, seed=number)
    stop = range(0, VOCABULARY, 7) if number % 3 == 0 else ()
    return server.submit(prompt, 12 + number, stop, sampling)


def ask_all(server, prompts) -> list[vcsd.RequestHandle]:  # type: ignore[no-untyped-def]
    return [ask(server, prompt, number) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(model, prompts) -> list[list[int]]:
    """Each request with the server to itself, everything on the device."""
    result = []
    for number, prompt in enumerate(prompts):
        with serve(model, background=False) as server:
            result.append(ask(server, prompt, number).result())
    return result


@pytest.mark.parametrize("make", [gpt_oss, gemma2, gemma3, MADE["bloom, 6 heads"]])
@pytest.mark.parametrize("policy", ["ours", "in-two-places", "tierkv"])
def test_server_tokens_equal_generate_with_logit_terms(prompts, make, policy) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        model = sharpen(make())
        options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        wanted = [
            model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts[:5]
        ]
    asked = setting(policy, tiers=TierLimits(device=1 << 17, host=1 << 17), max_tokens=LONGEST)
    with serve(model, asked, background=False) as server:
        streams = [server.submit(prompt, 30) for prompt in prompts[:5]]
        server.run()
        assert not server.kv.windows and not server.kv.requests()
    assert [stream.tokens for stream in streams] == wanted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [0, 5])
def test_server_tokens_equal_each_request_alone(model, prompts, alone, policy, chunk) -> None:
    with serve(model, setting(policy, prefill_chunk_tokens=chunk), background=False) as server:
        streams = ask_all(server, prompts)
        gone = streams[4]
        while len(gone.tokens) < 3:
            assert server.step()
        gone.cancel()
        server.run()
        kv = server.kv
        assert kv.runner.table.used.total() == 0 and not kv.requests() and not kv.real.frames
        for tier, spec in kv.runner.machine.tiers.items():
            assert spec.limit_bytes is None or kv.runner.table.peak[tier] <= spec.limit_bytes
        assert not kv.drives or not kv.drives.sequences
        text = server.counters.text()
    assert gone.finish_reason == "cancelled" and gone.tokens == alone[4][: len(gone.tokens)]
    for number, (stream, wanted) in enumerate(zip(streams, alone, strict=True)):
        if number != 4:
            assert stream.tokens == wanted, number
            assert stream.finish_reason == ("stop" if stream.tokens[-1] in stream.stop else "length")
    assert 'vcsd_requests_total{how="cancelled"} 1.0' in text
    assert "vcsd_tbt_seconds_bucket" in text and 'vcsd_peak_bytes{place="device"}' in text
    assert model.config._attn_implementation == "sdpa"


def test_tokens_stream_to_threads_during_arrivals(model, prompts, alone) -> None:
    result: dict[int, list[int]] = {}

    def listen(number: int, stream: vcsd.RequestHandle) -> None:
        result[number] = list(stream)

    with serve(model, setting("orbitflow", replan_on_drift=True)) as server:
        streams = ask_all(server, prompts)
        threads = [threading.Thread(target=listen, args=each) for each in enumerate(streams)]
        for thread in threads:
            thread.start()
        first = next(iter(streams[0]))
        for thread in threads:
            thread.join(HANG_S)
    assert first == alone[0][0] and [result[number] for number in range(len(prompts))] == alone


def test_rejected_request_has_reason(model) -> None:
    with serve(model, setting("orbitflow", max_queued_requests=2), background=False) as server:
        with pytest.raises(vcsd.RequestRejectedError, match="73 tokens in all: must be at most max_tokens = 72"):
            server.submit([1] * 13, 61)
        server.submit([1, 2], 3)
        server.submit([1, 2], 3)
        with pytest.raises(vcsd.RequestRejectedError, match="2 requests wait already"):
            server.submit([1, 2], 3)
        with pytest.raises(ValueError, match="0 tokens, and 3 new ones"):
            server.submit([], 3)
        server.run()
        server.submit([1, 2], 3)
        assert 'vcsd_requests_total{how="rejected"} 2.0' in server.counters.text()
    small = serve(model, setting("lru", tiers=TierLimits(device=TOKEN_BYTES * 64)), background=False)
    with small as server, pytest.raises(vcsd.RequestRejectedError, match="MB of KV cache, and the tier device has"):
        server.submit([1] * 40, 30)


def test_serving_model_is_exclusive_forward_unchanged(model) -> None:
    ids = torch.randint(1, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**given)
    with serve(model, setting("orbitflow"), background=False):
        assert torch.equal(model.generate(**given), wanted)
        with pytest.raises(vcsd.UnsupportedModelError, match="serves already"), vcsd.attach(model):
            pass
        with pytest.raises(vcsd.UnsupportedModelError, match="serves already"), serve(model):
            pass
    with (
        vcsd.attach(model),
        pytest.raises(vcsd.UnsupportedModelError, match="attached already, with the KV cache in drives"),
        serve(model),
    ):
        pass


def test_a_server_that_is_closed_ends_its_streams(model) -> None:
    with serve(model, setting("orbitflow")) as server:
        stream = server.submit([1, 2, 3], 60)
        next(iter(stream))
    assert stream.finish_reason == "cancelled" and 1 <= len(stream.result()) < 60
    with pytest.raises(vcsd.RequestRejectedError, match="closed"):
        server.submit([1], 1)


class Failing(InProcessDrive):
    """A drive of which one attention fails."""

    attends = 0

    def submit(self, command, submit_ns):  # type: ignore[no-untyped-def]
        self.attends += isinstance(command, Attend)
        if isinstance(command, Attend) and self.attends == 40:
            done = Future[Completion]()
            done.set_result(Completion(status=Status.UNRECOVERED_READ_ERROR, reason="lost"))
            return done
        return super().submit(command, submit_ns)


def test_failing_drive_ends_only_its_requests(model, prompts, alone) -> None:
    drive = Failing(INSTCSD_ZYNQ7045_8CH)
    with serve(model, setting("in-storage", drives=[drive], max_batch_size=3), background=False) as server:
        streams = ask_all(server, prompts)
        server.run()
        assert not server.kv.requests() and not server.kv.drives.sequences
    failed = [stream for stream in streams if stream.finish_reason == "failed"]
    assert 1 <= len(failed) <= 3
    with pytest.raises(vcsd.DriveError, match="lost"):
        failed[0].result()
    for stream, wanted in zip(streams, alone, strict=True):
        assert stream.tokens == (wanted[: len(stream.tokens)] if stream in failed else wanted)
    drive.close()


def test_report_has_tiers_and_drives(model, prompts) -> None:
    """A policy that may use drives, and tiers with room for everything."""
    with serve(model, policy="ours", drives=2, background=False) as server:
        server.submit(prompts[0], 3).result()
        report = server.report()
    assert report.drives.steps == 2 and not report.routes
    assert "Traffic (2 decode steps)" in str(report) and "KV cache in tiers: ours" in str(report)
    assert {tier["name"] for tier in report.tiers} == {"device"} and report.tiers[0]["peak_bytes"] > 0


def test_a_lost_drive_of_a_mirror_changes_no_token(model, prompts, alone) -> None:
    drives = [FailingDevice(INSTCSD_ZYNQ7045_8CH, name) for name in "ab"]
    drives[0].left = 60
    with serve(
        model, setting("in-storage", drives=drives, redundancy="mirror", network="100gbe"), background=False
    ) as server:
        streams = ask_all(server, prompts)
        server.run()
    assert [stream.tokens for stream in streams] == alone
    report = server.report()
    assert report.policy == "in-storage" and report.drives and "KV cache in tiers" not in str(report)
    assert report.drives.losses[0]["kind"] == "lost" and report.drives.breakdown_ns["network"] > 0
    for drive in drives:
        drive.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "best"}, "policy = 'best': must be one of reactive"),
        ({"policy": "ours", "drives": ()}, "policy = 'ours': attends in drives: set drives to at least 1"),
        ({"max_batch_size": 0}, "max_batch_size: must be greater"),
        ({"max_batch_size": "4"}, "max_batch_size: must be a valid integer"),
        ({"max_batch_size": 2.5}, "max_batch_size: must be a valid integer"),
        ({"tiers": 5}, "tiers: must be an instance of TierLimits"),
        ({"drives": 1.5}, "drives = 1.5: must be a whole number, at least 0, a fleet (ray), or devices"),
        ({"micro_batches": 2}, "micro_batches = 2: a server has none"),
        ({"redundancy": "recompute"}, "redundancy = 'recompute': a server does not compute lost heads again"),
        ({"slo_scale": 0}, "slo_scale: must be greater than 0"),
        ({"replan_on_drift": "no"}, "replan_on_drift: must be a valid boolean"),
        ({"max_tokens": 9999}, "max_tokens = 9999: the model's context is 512"),
    ],
)
def test_invalid_settings_are_one_line_error(model, given, says) -> None:
    with pytest.raises(ValueError, match=re.escape(says)), serve(model, **given):
        pass


@pytest.mark.parametrize("given", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"seed": -1}])
def test_invalid_sampling_is_refused(given) -> None:
    with pytest.raises(ValueError):
        vcsd.SamplingParams(**given)


@pytest.mark.parametrize("at", [1, 2, 12])
def test_interrupted_forward_ends_only_its_requests(model, prompts, alone, at) -> None:
    with serve(model, setting("orbitflow", max_batch_size=3), background=False) as server:
        streams = ask_all(server, prompts)
        forward, calls = server._rows.forward, iter(range(1, 10_000))

        def interrupted(*given):  # type: ignore[no-untyped-def]
            if next(calls) == at:
                raise KeyboardInterrupt
            return forward(*given)

        server._rows.forward = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            server.run()
        server.run()
        assert not server.kv.requests()
    failed = [stream for stream in streams if stream.finish_reason == "failed"]
    assert 1 <= len(failed) <= 3
    for stream, wanted in zip(streams, alone, strict=True):
        assert stream.tokens == (wanted[: len(stream.tokens)] if stream in failed else wanted)


def test_clients_read_and_cancel_without_server_thread(model, prompts, alone) -> None:
    with serve(model, setting("orbitflow"), background=False) as server:
        streams = ask_all(server, prompts)
        readers = [threading.Thread(target=stream.result) for stream in streams]
        for reader in readers:
            reader.start()
        while len(streams[3].tokens) < 4:
            pass
        threading.Thread(target=streams[3].cancel).start()
        for reader in readers:
            reader.join(HANG_S)
    assert [s.tokens for s in streams if s is not streams[3]] == [a for n, a in enumerate(alone) if n != 3]
    assert streams[3].tokens == alone[3][: len(streams[3].tokens)]


@pytest.mark.parametrize("policy", ["lru", "lfu", "static", "tierkv", "mended"])
def test_tiers_of_one_request_each_never_deadlock(model, policy) -> None:
    tiers = TierLimits(device=80 * TOKEN_BYTES, host=80 * TOKEN_BYTES)
    with serve(model, setting(policy, tiers=tiers, time_slice_tokens=1), background=False) as server:
        streams = [server.submit([1 + n] * (60 - n), 11) for n in range(8)]
        server.run()
    assert [stream.finish_reason for stream in streams] == ["length"] * 8


def test_chunked_long_prompt_does_not_stall_decodes(model) -> None:
    with serve(
        model, setting("orbitflow", prefill_chunk_tokens=1, max_tokens=400, tiers=TierLimits()), background=False
    ) as server:
        decoding = server.submit([1, 2, 3], 320)
        next(iter(decoding))
        server.submit([5] * 300, 2)
        before = len(decoding.tokens)
        for _ in range(250):
            server.step()
        assert len(decoding.tokens) - before >= 249 and decoding.max_idle <= 2


def test_finished_requests_are_counted_and_removed(model) -> None:
    with serve(model, setting("orbitflow")) as server:
        for number in range(20):
            server.submit([1, 2, 3 + number], 2).result()
            assert f'how="length"}} {number + 1}.0' in server.counters.text()


def test_sampled_tokens_do_not_depend_on_default_device() -> None:
    logits, sampling = torch.arange(9.0), vcsd.SamplingParams(temperature=1, seed=1)
    with torch.device("meta"):
        result = Sampler(sampling).next(logits, [1, 2])
    assert result == Sampler(sampling).next(logits, [1, 2])


def test_failed_sampling_ends_only_its_request(model, prompts, alone) -> None:
    with serve(model, setting("orbitflow"), background=False) as server:
        streams = ask_all(server, prompts)
        streams[1].sampler = None  # type: ignore[assignment]
        server.run()
    assert streams[1].finish_reason == "failed"
    assert [s.tokens for n, s in enumerate(streams) if n != 1] == [a for n, a in enumerate(alone) if n != 1]
    with serve(model, setting("orbitflow"), background=False) as server:
        cold = server.submit(prompts[0], 9, sampling=vcsd.SamplingParams(temperature=1e-39, seed=1)).result()
        assert cold == server.submit(prompts[0], 9).result()


def test_prompt_types_are_accepted_or_refused(model) -> None:
    with serve(model, setting("orbitflow"), background=False) as server:
        wanted = server.submit([1, 2, 3], 4).result()
        assert server.submit(torch.tensor([[1, 2, 3]]), 4).result() == wanted
        assert server.submit(torch.tensor([1, 2, 3]), 4, stop=torch.tensor(wanted[1])).result() == wanted[:2]
        for given in ([1.5], [-1], [VOCABULARY], [True], "abc", [[1], [2]], [2**70], 1.5):
            with pytest.raises(ValueError, match="prompt"):
                server.submit(given, 4)
        for new in (2.5, None, True):
            with pytest.raises(ValueError, match="max_new_tokens"):
                server.submit([1], new)


def test_logprobs_are_kept_only_if_asked(model, prompts) -> None:
    """The greedy token is the most probable one; the listener hears of each token and of the end."""
    heard = list[str]()
    with serve(model, setting("orbitflow"), background=False) as server:
        plain = server.submit(prompts[0], 5)
        asked = vcsd.SamplingParams(logprobs=2)
        told = server.submit(prompts[0], 5, sampling=asked, listener=lambda: heard.append(told.finish_reason))
        server.run()
    assert plain.tokens == told.tokens and plain.logprobs == []
    assert [logprob.top[0] for logprob in told.logprobs] == [
        (token, logprob.logprob) for token, logprob in zip(told.tokens, told.logprobs, strict=True)
    ]
    assert heard == [""] * 5 + ["length"] and all(len(logprob.top) == 2 for logprob in told.logprobs)


def test_cancel_has_reason(model, prompts) -> None:
    with serve(model, setting("orbitflow"), background=False) as server:
        stream = server.submit(prompts[0], 50)
        assert next(iter(stream)) == stream.tokens[0]
        stream.cancel("stop")
        assert stream.finish_reason == "stop" and not server.kv.requests()
        assert 'vcsd_requests_total{how="stop"} 1.0' in server.counters.text()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_positions_are_refused(kind) -> None:
    scaling = {"rope_theta": 1e4, "rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(vcsd.UnsupportedModelError, match=f"rope of kind {kind}"), serve(llama(rope_parameters=scaling)):
        pass
