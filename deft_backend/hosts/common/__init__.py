"""What the adapters of all hosts share."""
