"""The time that the plugin's hooks add to a replayed decode step."""
