"""Systems compared like with like: same schedule, same output error, same hardware, same service."""
