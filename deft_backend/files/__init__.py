"""Files that the package writes and reads: private, checked, and with their origin."""
