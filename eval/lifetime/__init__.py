"""How long drives live under the write patterns of serving engines, and what energy and money a token costs."""
