"""Drive description files: YAML with the fields of `csd_spec.DriveSpec`, checked on load.

The shipped ones are in drives/. Putting a drive behind a real NVMe driver will be described here too.
"""

from nvmevirt_config.describe import SHIPPED, load_drive

__all__ = ["SHIPPED", "load_drive"]
