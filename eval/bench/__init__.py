"""The emulator itself, measured beside its rivals."""
