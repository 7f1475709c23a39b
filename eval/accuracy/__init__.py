"""Effect of attention methods on the output of models."""
