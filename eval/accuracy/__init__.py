"""What methods of attention do to a model's work."""
