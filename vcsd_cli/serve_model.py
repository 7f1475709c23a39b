"""`vcsd serve-model`: an OpenAI-compatible HTTP endpoint of a model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from csd_link.driveset import DriveSetConfig
from csd_spec.checked import frozen_value
from kv_cache.hardware import CSD
from vcsd.config import IN_STORAGE, ServingConfig
from vcsd.endpoint.run import check_key_for, http_server, listen, require_packages, url_of
from vcsd.options import MAX_TOKENS_HELP, check_model
from vcsd.progress import note, status
from vcsd_cli.run import CreatedDriveOptions, Processor, drive_set, with_checked_drives
from vcsd_cli.shared import importing
from vcsd_cli.tiers import TierLimitOptions, check_limits

BUNDLED = "bundled"
KEY_VARIABLE = "VCSD_API_KEY"
MODEL_HELP = "folder or name of a decoder, e.g. smollm2 (default: the bundled one)"
POLICY_HELP = "policy of docs/server.md, or FILE:NAME; in-storage: all KV data is in drives, which attend"
KEY_HELP = "key that clients must send; needed unless --host is a loopback address"
NAME_HELP = "name of the model for clients (default: the model's name or folder)"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """HTTP."""

    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=(1 << 16) - 1, help="port; 0: any free port")] = 8000
    api_key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help=KEY_HELP)] = None
    served_model_name: Annotated[str | None, typer.Option(help=NAME_HELP)] = None


@frozen_value
class ServeModelOptions(CreatedDriveOptions, ServingConfig):
    """Drives, for policies that attend in them."""

    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = IN_STORAGE
    max_tokens: Annotated[  # vLLM's name: in OpenAI's API, `max_tokens` is the length of the answer alone
        int | None, typer.Option("--max-model-len", min=1, max=1 << 24, help=MAX_TOKENS_HELP)
    ] = None

    def drive_set(self) -> DriveSetConfig:
        return drive_set(self, self.drives, self.drive_config, self.spares)


def serve_model(
    options: ServeModelOptions,
    http: HttpOptions,
    tiers: TierLimitOptions,
    model: Annotated[Path | None, typer.Argument(help=MODEL_HELP, callback=check_model)] = None,
    device: Annotated[Processor, typer.Option(help="device of the model")] = Processor.CPU,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until interrupted."""
    require_packages()
    check_key_for(http.host, http.api_key)
    options = _checked(options, tiers)
    with closing(listen(http.host, http.port)) as listening:
        with status("loading the model"), importing():
            from vcsd.endpoint.app import EndpointConfig, ModelEndpoint
            from vcsd.endpoint.text import end_tokens
            from vcsd.loading import CHECKPOINT, load
            from vcsd.serving import serve

            loaded, tokenizer = load(model or CHECKPOINT, device)
        name = http.served_model_name or (model.name if model else BUNDLED)
        endpoint = EndpointConfig(name, http.api_key, end_tokens(loaded, tokenizer))
        with serve(loaded, options) as server:
            running = http_server(ModelEndpoint(server, tokenizer, endpoint))
            note(_placement(options))
            note(f"serving {name} at {url_of(listening)}: stop it with Ctrl-C")
            running.run(sockets=[listening])
            if options.has_drives and server.counters.tokens and not server.kv.runner.table.peak[CSD]:
                note(f"no KV data has been in the drives: --policy {options.policy} had room elsewhere")
    note("stopped")


def _placement(options: ServeModelOptions) -> str:
    """Where KV data goes, and a warning if drives that are given will hold nothing."""
    if not options.has_drives:
        return f"KV data: on the device, in host memory and in files, placed by --policy {options.policy}; no drives"
    drives, limit = options.drive_set(), options.tiers.device if options.tiers else None
    if options.in_drives:
        return f"KV data: in {drives.count} drives, which attend; only windows stay on the device"
    if limit is None:
        return (
            f"warning: --policy {options.policy} may leave its {drives.count} drives empty, as the device has no "
            "limit: add --device-kv-mib MIB, or leave out --policy"
        )
    return f"KV data: on the device up to {limit / 2**20:g} MiB, then placed by --policy {options.policy}"


def _checked(options: ServeModelOptions, tiers: TierLimitOptions) -> ServeModelOptions:
    """Options that are checked before the model is loaded."""
    check_limits(options, tiers)
    options = replace(options, tiers=tiers.limits())
    if CSD not in options.new_policy().tiers:
        if options.drives:
            raise ValueError(f"drives = {options.drives}: the policy {options.policy} uses none: leave it out")
        return options
    return with_checked_drives(options)
