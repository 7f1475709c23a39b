"""Computational drives on hosts and a network: a drive as a calibrated line, requests as events."""
