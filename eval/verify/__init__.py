"""Tools that damage, cut, kill, fuzz or simulate drives, and check that no data is lost or wrong."""
