"""`deft ab`: the host's own backend compared with tree attention on the same requests."""
