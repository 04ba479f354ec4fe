"""The package's version, for modules below the package itself."""

VERSION = "0.1.0"
