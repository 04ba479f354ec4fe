"""Times of multi-head latent attention over trees, compared with the host's kernel."""
