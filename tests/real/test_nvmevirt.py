"""NVMeVirt's module in the guest machine."""

import json
import subprocess
import sys

VCSD = sys.executable, "-c", "from vcsd_cli.main import main; main()"


def test_guest_decodes_over_nvmevirt_as_in_process(nvmevirt_module):
    """Over the block device and over the character device of NVMeVirt's controller."""
    command = *VCSD, "guest", "run", "--module", nvmevirt_module, "-o", "json"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["drive"], result["equal"], result["differ"]) == ("nvmevirt", True, [])
    assert result["id_ctrl"]["sn"].startswith("CSL_Virt") and result["decoded_over"] == ["ng1n1", "nvme1n1"]
