"""Watch running servers from outside, by their state files: `deft top` and `deft inspect`."""
