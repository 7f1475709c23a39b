"""Drive description files: YAML with the fields of `csd_spec.DriveSpec`, checked on load; which drives to serve.

The shipped descriptions are in drives/.
"""

from nvmevirt_config.describe import SHIPPED, load_drive
from nvmevirt_config.served import ServeConfig, load_config

__all__ = ["SHIPPED", "ServeConfig", "load_config", "load_drive"]
