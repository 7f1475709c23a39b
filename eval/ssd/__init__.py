"""Public SSDs in the model of a conventional SSD: every constant has a source about the hardware, none is fitted."""
