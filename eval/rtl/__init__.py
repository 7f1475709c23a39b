"""Resources and clocks of the RTL."""
