"""Which layers of each request lie away from the device: the problem, and ways to solve it."""
