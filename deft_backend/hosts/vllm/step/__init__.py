"""What happens in every step: metadata, plan, and each layer."""
