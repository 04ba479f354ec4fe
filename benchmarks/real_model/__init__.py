"""A trained model: its checkpoint, and its perplexity through tree attention."""
