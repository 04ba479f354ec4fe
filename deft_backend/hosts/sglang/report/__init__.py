"""What the adapter tells of its server: counters and accepted drafts."""
