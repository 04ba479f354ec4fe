"""Small models of many architectures, each decoded by tree attention and by the host's backend."""
