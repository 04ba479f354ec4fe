"""Starting a host server: its command line, its process, and a stand-in for the GPU driver."""
