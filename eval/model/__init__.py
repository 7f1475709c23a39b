"""The shipped checkpoint's training, and models of other programs."""
