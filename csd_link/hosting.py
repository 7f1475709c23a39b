"""Hosting options: resources of the machine for its drives, in this process or in their own processes."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from csd_io.folder import Durability
from csd_io.medium import Kind, Medium
from csd_spec.checked import frozen_part

MAX_MIB, MAX_THREADS = 1 << 24, 1024  # limits of user settings
PAGE_BUFFER_MIB = Medium().cache_bytes >> 20


@frozen_part
class HostingOptions:
    """How drives are run; None: the default. Simulated results do not depend on these options."""

    durability: Annotated[
        Durability | None,
        Field(description="failure that flushed data survives: end of the drive's process (default), or power loss"),
    ] = None
    medium: Annotated[
        Kind | None, Field(description="storage of flash pages: memory (default), or direct, the drives' files")
    ] = None
    page_buffer_mib: Annotated[
        int | None,
        Field(ge=1, le=MAX_MIB, description=f"DRAM for pages of a direct drive, MiB (default: {PAGE_BUFFER_MIB})"),
    ] = None
    threads: Annotated[
        int | None, Field(ge=1, le=MAX_THREADS, description="kernel threads per drive (default: cores / drives)")
    ] = None

    @property
    def overrides(self) -> dict[str, Any]:
        """The options that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(HostingOptions)}
        return {name: value for name, value in values.items() if value is not None}

    def hosting_fields(self, drives: int) -> dict[str, Any]:
        """The options that are set, for one of `drives` drives, which share the cores."""
        return {"threads": max(1, len(os.sched_getaffinity(0)) // drives)} | self.overrides

    @property
    def storage(self) -> Medium:
        """Storage of pages at run time."""
        return Medium(self.medium or "memory", (self.page_buffer_mib or PAGE_BUFFER_MIB) << 20)

    def _check(self, folder: Path | None) -> None:
        """Raise ValueError if pages are kept in files; `folder` is where these would be stored."""
        if self.medium == "direct" and not folder:
            raise ValueError("medium = direct: needs a folder to keep drives in")
