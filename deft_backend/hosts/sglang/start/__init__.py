"""What happens once, when the server starts: arguments, checks, and the backend that is built."""
