"""Programs that use the package; the package does not hold them."""
