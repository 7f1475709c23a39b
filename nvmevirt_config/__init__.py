"""Configuration files: drive descriptions (YAML with the fields of `csd_spec.DriveSpec`), and drives to serve.

The shipped descriptions are in drives/.
"""

from nvmevirt_config.describe import SHIPPED, load_drive
from nvmevirt_config.serve_config import load_config

__all__ = ["SHIPPED", "load_config", "load_drive"]
