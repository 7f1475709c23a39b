"""`vcsd serve-model`: an OpenAI-compatible HTTP endpoint of a model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from csd_link.driveset import DriveOptions, DriveSetConfig
from csd_spec import AttentionConfig
from csd_spec.checked import frozen_value
from kv_cache.hardware import CSD
from kv_cache.limits import TierLimits
from kv_cache.policies import policy_of
from vcsd.endpoint.run import check_key_for, http_server, listen, require_packages, url_of
from vcsd.options import MAX_TOKENS_HELP, ServingLimits, check_model
from vcsd.progress import note, status
from vcsd.transport import check_drives, check_method, methods_of
from vcsd_cli.lazy import first_given
from vcsd_cli.run import DRIVES_METAVAR, DriveFile, MethodOptions, Processor, drive_set, parse_drives
from vcsd_cli.shared import importing
from vcsd_cli.tiers import IN_STORAGE, TierLimitOptions

BUNDLED = "bundled"
KEY_VARIABLE = "VCSD_API_KEY"
MODEL_HELP = "folder or name of a decoder, e.g. smollm2 (default: the bundled one)"
POLICY_HELP = "policy of docs/server.md, or FILE:NAME; in-storage: all KV data is in drives, which attend"
DRIVES = 2  # default, for policies that attend in drives
KEY_HELP = "key that clients must send; needed unless --host is a loopback address"
NAME_HELP = "name of the model for clients (default: the model's name or folder)"


@frozen_value
class ServingOptions(ServingLimits):
    """Policy."""

    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = IN_STORAGE
    max_tokens: Annotated[  # vLLM's name: in OpenAI's API, `max_tokens` is the length of the answer alone
        int | None, typer.Option("--max-model-len", min=1, max=1 << 24, help=MAX_TOKENS_HELP)
    ] = None


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """HTTP."""

    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=(1 << 16) - 1, help="port; 0: any free port")] = 8000
    api_key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help=KEY_HELP)] = None
    served_model_name: Annotated[str | None, typer.Option(help=NAME_HELP)] = None


@frozen_value
class ServedDriveOptions(DriveOptions):
    """Drives, for policies that attend in them."""

    drives: Annotated[
        str | None,
        typer.Option(
            parser=parse_drives,
            metavar=DRIVES_METAVAR,
            help=f"drives for such a policy, or a fleet's (default: {DRIVES}, or none if the policy uses none)",
        ),
    ] = None
    drive_config: DriveFile = None


def serve_model(
    serving: ServingOptions,
    http: HttpOptions,
    tiers: TierLimitOptions,
    what: MethodOptions,
    where: ServedDriveOptions,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="folder or name of a decoder, e.g. smollm2 (default: the bundled one)", callback=check_model
        ),
    ] = None,
    device: Annotated[Processor, typer.Option(help="device of the model")] = Processor.CPU,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until interrupted."""
    require_packages()
    check_key_for(http.host, http.api_key)
    drives, attention = _drives(serving.policy, what, where)
    limits = _limits(serving.policy, tiers)
    with closing(listen(http.host, http.port)) as listening:
        with status("loading the model"), importing():
            from vcsd.endpoint.app import EndpointConfig, ModelEndpoint
            from vcsd.endpoint.text import end_tokens
            from vcsd.loading import CHECKPOINT, load
            from vcsd.serving import ServingConfig, serve

            config = ServingConfig(
                policy=serving.policy,
                tiers=limits,
                drives=drives,
                attention=attention,
                **{field.name: getattr(serving, field.name) for field in fields(ServingLimits)},
            )
            loaded, tokenizer = load(model or CHECKPOINT, device)
        name = http.served_model_name or (model.name if model else BUNDLED)
        setting = EndpointConfig(name, http.api_key, end_tokens(loaded, tokenizer))
        with serve(loaded, config) as server:
            running = http_server(ModelEndpoint(server, tokenizer, setting))
            note(_placement(serving.policy, drives, limits))
            note(f"serving {name} at {url_of(listening)}: stop it with Ctrl-C")
            running.run(sockets=[listening])
            if drives and server.counters.tokens and not server.kv.runner.table.peak[CSD]:
                note(f"no KV data has been in the drives: --policy {serving.policy} had room elsewhere")
    note("stopped")


def _placement(policy: str, drives: DriveSetConfig | tuple[()], limits: TierLimits) -> str:
    """Where KV data goes, and a warning if drives that are given will hold nothing."""
    if not drives:
        return f"KV data: on the device, in host memory and in files, placed by --policy {policy}; no drives"
    if policy == IN_STORAGE:
        return f"KV data: in {drives.count} drives, which attend; only windows stay on the device"
    if limits.device is None:
        return (
            f"warning: --policy {policy} may leave its {drives.count} drives empty, as the device has no limit: add "
            "--device-kv-mib MIB, or leave out --policy"
        )
    return f"KV data: on the device up to {limits.device / 2**20:g} MiB, then placed by --policy {policy}"


def _drives(
    policy: str, what: MethodOptions, where: ServedDriveOptions
) -> tuple[DriveSetConfig | tuple[()], AttentionConfig]:
    """Drives and attention of the options; raises ValueError if the policy and the options do not fit."""
    attends = CSD in policy_of(policy).tiers
    option = first_given(what) or first_given(where)
    if option and not attends:
        raise ValueError(f"{option}: --policy {policy} uses no drives: leave it out, or choose --policy ours")
    attention = what.attention("dense")
    if not attends:
        return (), attention
    drives = drive_set(where, where.drives or str(DRIVES), where.drive_config)
    check_drives(drives)
    check_method(attention, methods_of(drives))
    return drives, attention


def _limits(policy: str, tiers: TierLimitOptions) -> TierLimits:
    """Limits of the options; raises ValueError if the policy does not use them."""
    if policy == IN_STORAGE and (option := first_given(tiers)):
        raise ValueError(f"{option}: --policy {policy} keeps all KV data in drives: add --policy orbitflow or ours")
    return tiers.limits()
