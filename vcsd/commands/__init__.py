"""The command line's groups, one file each."""
