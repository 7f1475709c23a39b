"""Files and blocks: what must outlive a process by `csd_io.folder`, blocks past the page cache by `csd_io.direct`."""
