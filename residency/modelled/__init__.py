"""Turns in modelled time: an event queue in integer nanoseconds over links that share their bandwidth."""
