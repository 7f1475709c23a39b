"""Plug-ins for serving engines: one module per engine, which imports that engine."""
