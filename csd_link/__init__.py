"""The link between host and drive: commands as bytes, windows of blocks, both ends, and the ways to reach drives."""
