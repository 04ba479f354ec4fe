"""Tools of this repository: the version matrix, the documentation site and their requirements."""
