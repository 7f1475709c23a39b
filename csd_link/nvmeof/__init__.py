"""NVMe over TCP: PDUs, a controller for a drive, and a host (initiator)."""
