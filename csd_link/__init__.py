"""Link between host and drive: command encoding, block windows with host and controller sides, and transports."""
