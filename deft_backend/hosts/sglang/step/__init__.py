"""What happens in every step: who decodes it, who plans it, and each layer."""
