"""Programs that use the package; not part of it."""
