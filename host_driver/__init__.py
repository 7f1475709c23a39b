"""Host driver: shards heads over drives, submits commands to all of them, and connects to Hugging Face models.

Entry point: `host_driver.driver.Driver`, which needs no torch. Only `host_driver.hf` and the modules on it do.
"""
