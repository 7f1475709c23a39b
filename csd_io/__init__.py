"""File and block I/O: durable files through `csd_io.folder`, direct I/O on blocks through `csd_io.direct`."""
