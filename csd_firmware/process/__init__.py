"""A drive with a process of its own: serving its windows, mounting it, restarting it."""
