"""SGLang: registers the attention backend ``deft``, reads the radix tree, runs the plan."""
