"""What happens once, when the server starts: classes, checks, and the group that is built."""
