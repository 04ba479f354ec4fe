"""What a user sets, and the names that users write: variables, policies, versions."""
