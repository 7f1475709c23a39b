"""Turns with bytes: frames in memory and in files, and threads that copy between them."""
