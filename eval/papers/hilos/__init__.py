"""HILOS (arXiv 2502.09921): predictions with intervals, made before its results were read."""
