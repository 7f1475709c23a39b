"""What we are measured against and did not invent."""
