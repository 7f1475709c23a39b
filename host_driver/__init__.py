"""The host's side: heads over drives, commands to all of them at once, and the way into Hugging Face models.

`host_driver.driver` needs no torch; only `host_driver.hf` does.
"""
