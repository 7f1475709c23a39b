"""NVMe over TCP: PDUs, a controller in front of a drive, and an initiator."""
