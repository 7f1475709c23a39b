"""Third-party baselines."""
