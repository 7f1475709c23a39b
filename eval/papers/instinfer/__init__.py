"""InstInfer's systems, claims and figures at full scale."""
