"""Benchmarks of deft-backend, run from a checkout: ``python -m benchmarks --help``.

The package `deft_backend` never imports this package, and no wheel holds it.
"""
