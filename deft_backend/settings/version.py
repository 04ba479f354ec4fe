"""The package's version: the one place that holds it."""

VERSION = "0.3.0"
