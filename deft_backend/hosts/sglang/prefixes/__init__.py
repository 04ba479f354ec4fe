"""The forest of a batch, from the host's prefix caches or its page table."""
