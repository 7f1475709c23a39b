"""Serving under load: requests that come and go, where their K and V lie meanwhile, and what they wait for."""
