"""Drive processes: serving windows, mounting, and supervision with restarts."""
