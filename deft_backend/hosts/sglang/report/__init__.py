"""What the adapter reports about its server: counters and accepted drafts."""
